"""config/python_code.py with forgetting attention: forget gates in place of RoPE, and an output gate."""

from config.python_code import *

layers = "forgetting(gate=True)"
position = "none"            # the gates tell order, as in the paper
max_iters = 500

# validation loss 4.073 nats a token, 1 M tokens, in 12 min on one core of a Zen 4 EPYC (bfloat16; the other core was busy), 2026-11-30
