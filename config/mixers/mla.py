"""config/python_code.py with multi-head latent attention: a token leaves 288 numbers a layer, where attention leaves 512."""

from config.python_code import *

layers = "mla"
qk_norm = False              # mla normalises its latents instead
max_iters = 500

# validation loss 4.164 nats a token, 1 M tokens, in 8 min on one core of a Zen 4 EPYC (bfloat16; the other core was busy), 2026-11-30
