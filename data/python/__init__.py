"""The Python standard library of the interpreter in use."""
