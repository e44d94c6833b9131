"""config/python_code.py with hierarchical attention: sentences of 8 tokens, paragraphs of 4 sentences in its context of 256."""

from config.python_code import *

layers = "hierarchical(sentence=8, paragraph=4)"
max_iters = 500

# validation loss 4.271 nats a token, 1 M tokens, in 28 min on one core of a Zen 4 EPYC (bfloat16; the other core was busy), 2026-11-30
