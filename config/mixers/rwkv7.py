"""config/python_code.py with RWKV-7: no attention, a state of 64 x 64 numbers a head and nothing that grows with the text."""

from config.python_code import *

layers = "rwkv7"
mlp = "rwkv7"                # relu2 that sees the token before
position = "none"            # the decay and the token shift tell order
qk_norm = False

# No run of this file has been recorded yet.
