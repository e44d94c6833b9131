"""Pure functions on tensors: who stands where, attention, rotary positions. No parameters, no state, no imports of ours.

Letters everywhere: B rows, T new tokens, S keys, C width of the residual stream, H query heads, G key/value heads, D head width.
Heads stand before time: q (B, H, T, D), k and v (B, G, S, D).
"""
