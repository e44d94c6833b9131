"""config/python_code.py as Samba (arXiv 2406.07522) mixes: Mamba and attention over a window take turns, so no state grows."""

from config.python_code import *

layers = "mamba attention(window=64)"

# No run of this file has been recorded yet.
