"""config/python_code.py with hierarchical attention: sentences of 8 tokens, paragraphs of 4 sentences in its context of 256."""

from config.python_code import *

layers = "hierarchical(sentence=8, paragraph=4)"
max_iters = 500

# No run of this file has been recorded yet.
