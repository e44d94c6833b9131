"""config/python_code.py with Qwen3-Next's mixture: three layers of Gated DeltaNet, whose keys two value heads share, then one of
attention with an output gate and a quarter of each head rotated."""

from config.python_code import *

layers = "gated_deltanet(key_heads=2)*3 attention(gate=True, rotary=16)"
n_layer = 8
n_kv_head = 2

# No run of this file has been recorded yet.
