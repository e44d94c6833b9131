"""config/python_code.py with multi-head latent attention: a token leaves 288 numbers a layer, where attention leaves 512."""

from config.python_code import *

layers = "mla"
qk_norm = False              # mla normalises its latents instead
max_iters = 500

# No run of this file has been recorded yet.
