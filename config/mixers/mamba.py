"""config/python_code.py with Mamba in every layer: no attention, no positions, a state that does not grow."""

from config.python_code import *

layers = "mamba"
position = "none"            # the scan tells order
qk_norm = False

# No run of this file has been recorded yet.
