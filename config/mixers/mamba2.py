"""config/python_code.py with Mamba-2 in every layer: 8 heads of 64 channels, each with a state of 64 x 64."""

from config.python_code import *

layers = "mamba2(d_state=64)"
position = "none"            # the recurrence tells order
qk_norm = False

# No run of this file has been recorded yet.
