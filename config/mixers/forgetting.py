"""config/python_code.py with forgetting attention: forget gates in place of RoPE, and an output gate."""

from config.python_code import *

layers = "forgetting(gate=True)"
position = "none"            # the gates tell order, as in the paper
max_iters = 500

# No run of this file has been recorded yet.
