"""config/python_code.py with low-rank segments (Linformer made causal): a token leaves an eighth of its keys and values behind."""

from config.python_code import *

layers = "lowrank(segment=32, rank=4)"
max_iters = 500

# No run of this file has been recorded yet.
