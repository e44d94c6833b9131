"""config/python_code.py with linear attention: a kernel in place of softmax, a past that is one matrix a head."""

from config.python_code import *

layers = "linear"
qk_norm = False              # elu + 1 takes them as they are

# No run of this file has been recorded yet.
