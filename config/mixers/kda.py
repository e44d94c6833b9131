"""config/python_code.py with Kimi Delta Attention: Gated DeltaNet that decays by channel."""

from config.python_code import *

layers = "kda"
qk_norm = False              # its queries and keys have length 1 anyway

# No run of this file has been recorded yet.
