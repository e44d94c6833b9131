"""Linformer (Wang et al. 2020, arXiv 2006.04768): attention to learned mixtures of all positions. For comparison and encoders: it
cannot be causal. mixers/lowrank.py is what a decoder can have of it."""

from __future__ import annotations

from torch import Tensor

from ops.attend import How, fused


def linformer(q: Tensor, k: Tensor, v: Tensor, E: Tensor, F: Tensor, causal: bool = False) -> Tensor:
    """q (B, H, T, D), k (B, G, S, D), v (B, G, S, V), E and F (r, S) or (G, r, S) -> (B, H, T, V): softmax(q (E k)^T / sqrt(D)) F v.

    Time T r, whatever S; a sequence of another length needs other matrices. ValueError with causal=True: every row of E k mixes all
    positions, so that no mask over the r rows keeps a query from seeing later ones.
    """
    if causal:
        raise ValueError("Linformer cannot be causal: each of its rows mixes all positions, later ones too; the word lowrank can")
    return fused(q, E @ k, F @ v, None, How())
