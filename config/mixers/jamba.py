"""config/python_code.py as Jamba (arXiv 2403.19887) mixes: one layer of eight is attention, and nothing else tells positions. Its
experts are not here."""

from config.python_code import *

layers = "mamba(norms=True)*4 attention(rope=False) mamba(norms=True)*3"
n_layer = 8
n_kv_head = 2
position = "none"            # what the Mamba layers say of order is enough
qk_norm = False

# No run of this file has been recorded yet.
