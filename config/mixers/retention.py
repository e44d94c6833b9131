"""config/python_code.py with retention (RetNet): a fixed decay and a rotation for each head, values as wide as keys."""

from config.python_code import *

layers = "retention(expand_v=1)"      # as many parameters as attention with a gate; the paper's 2 wants a narrower n_inner
qk_norm = False                       # it normalises its outputs instead

# No run of this file has been recorded yet.
