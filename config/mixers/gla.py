"""config/python_code.py with gated linear attention: each channel of the state fades by what the token says."""

from config.python_code import *

layers = "gla"
position = "none"            # decay tells order, as in the paper
qk_norm = False              # it normalises its outputs instead

# No run of this file has been recorded yet.
