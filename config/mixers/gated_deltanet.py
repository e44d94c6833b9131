"""config/python_code.py with Gated DeltaNet: the delta rule on a state that each head lets decay."""

from config.python_code import *

layers = "gated_deltanet"
qk_norm = False              # its queries and keys have length 1 anyway

# No run of this file has been recorded yet.
