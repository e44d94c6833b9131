"""config/python_code.py with strided attention (Sparse Transformer): 16 neighbours and every 16th key of 256."""

from config.python_code import *

layers = "sparse(pattern='local(16) | strided(16)')"
max_iters = 500

# No run of this file has been recorded yet.
