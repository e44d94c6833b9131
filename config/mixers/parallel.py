"""config/python_code.py with Mamba-2 and attention side by side in every layer, in the spirit of Falcon-H1 (arXiv 2507.22448): both read
the same normalised input, and their outputs are added."""

from config.python_code import *

layers = "mamba2(d_state=64, expand=1)|attention"
n_kv_head = 2

# No run of this file has been recorded yet.
