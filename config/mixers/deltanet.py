"""config/python_code.py with DeltaNet: a state of fixed size, from which what a key held is taken out before its value is written."""

from config.python_code import *

layers = "deltanet"
qk_norm = False              # deltanet's queries and keys have length 1 anyway

# No run of this file has been recorded yet.
