"""The calls of flash-linear-attention's kernels, which need a GPU: against stand-ins of the same signatures, a token at a time."""

import importlib.metadata
import importlib.util

import pytest
import torch

from ops import fla
from ops.delta_rule import delta_rule
from ops.positions import Positions
from ops.recurrence import recurrence
from ops.rwkv7 import rwkv7

CPU = torch.device("cpu")
PACKED = torch.tensor([[*range(9)], [4, 5, 0, 1, 2, 0, 0, 1, 2], [-1, -1, 3, 4, 0, 1, 2, -1, -1], [-1] * 9])


def stand_in(name):
    """By the documentation: (B, T, H, channels), log decays, states (N, H, K, V) of N sequences, which with cu_seqlens lie in one row."""
    def kernel(*, q=None, r=None, k, v, g=None, w=None, beta=None, u=None, a=None, b=None, scale, initial_state, output_final_state, cu_seqlens):
        q, g = r if q is None else q, w if g is None else g
        given = [t for t in (q, k, v, g, beta, a, b) if t is not None]
        assert scale == 1.0 and output_final_state and all(t.is_contiguous() and t.dtype in (q.dtype, torch.float32) for t in given)
        rows = [[t if t is None else t[n] for t in (q, k, v, g, beta, a, b)] for n in range(len(q))]
        if cu_seqlens is not None:
            assert len(q) == 1 and cu_seqlens.dtype == torch.int64
            rows = [[t if t is None else t[s:e] for t in rows[0]] for s, e in zip(cu_seqlens, cu_seqlens[1:])]
        assert initial_state is None or len(initial_state) == len(rows)
        ends, ys = [], []
        for n, (q, k, v, g, beta, a, b) in enumerate(rows):
            h = k.new_zeros(k.shape[1], k.shape[2], v.shape[2]) if initial_state is None else initial_state[n]
            for t in range(len(q)):
                old, new = h, v[t]
                if g is not None:
                    h = h * g[t].exp().reshape(h.shape[0], -1, 1)
                if beta is not None:
                    new = beta[t, :, None] * (new - torch.einsum("hk,hkv->hv", k[t], h))
                if a is not None:
                    h = h + torch.einsum("hk,hv->hkv", b[t], torch.einsum("hk,hkv->hv", a[t], old))
                new = torch.einsum("hk,hv->hkv", k[t], new)
                h = h + new
                ys.append(torch.einsum("hk,hkv->hv", q[t], h if u is None else old + u[..., None] * new))
            ends.append(h)
        y = torch.stack(ys)
        return (y[None] if cu_seqlens is not None else y.unflatten(0, (len(rows), -1))), torch.stack(ends)
    return kernel


def by_fla_itself(name):
    """fla-core's own plain functions in place of its kernels; the package is not imported, as transformers would take its kernels."""
    try:
        folder = importlib.metadata.distribution("fla-core").locate_file("fla/ops")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed: pip install --no-deps fla-core einops into a folder of sys.path")
    file, function = {"chunk_simple_gla": ("simple_gla", "naive_recurrent_simple_gla"), "chunk_gla": ("gla", "naive_recurrent_gla"),
                      "chunk_gated_delta_rule": ("gated_delta_rule", "naive_recurrent_gated_delta_rule"), "chunk_kda": ("kda", "naive_recurrent_kda")}[name]
    spec = importlib.util.spec_from_file_location(f"fla_{file}_for_calls", f"{folder}/{file}/naive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = getattr(module, function)

    def kernel(*, cu_seqlens, initial_state, output_final_state, scale, **x):
        options = dict(output_final_state=True) | ({} if name == "chunk_gla" else dict(scale=scale))
        if name == "chunk_gla":                    # its own scale, and another name of the decay
            x["q"], x["gk"] = x["q"] * x["q"].shape[-1] ** 0.5, x.pop("g")
        if cu_seqlens is None:
            return run(**x, initial_state=initial_state, **options)
        pairs = [run(**{key: t[:, s:e] for key, t in x.items()}, initial_state=None if initial_state is None else initial_state[n:n + 1], **options)
                 for n, (s, e) in enumerate(zip(cu_seqlens, cu_seqlens[1:]))]
        return torch.cat([y for y, _ in pairs], 1), torch.cat([h for _, h in pairs])
    return kernel


def draw(*shape):
    return (torch.randn(shape) / 2).requires_grad_()


def decay(*shape):
    return (-torch.rand(shape)).requires_grad_()


B, H, T, K, V = 4, 4, 9, 6, 5
CASES = {
    "no decay": lambda: (recurrence, [draw(B, H, T, K), draw(B, H, T, K), draw(B, H, T, V), None], {}),
    "grouped queries": lambda: (recurrence, [draw(B, H, T, K), draw(B, 2, T, K), draw(B, 2, T, V), decay(B, 2, T)], {}),
    "shared keys": lambda: (recurrence, [draw(B, 2, T, K), draw(B, 2, T, K), draw(B, H, T, V), decay(B, H, T)], {}),
    "a head's constant": lambda: (recurrence, [draw(B, H, T, K), draw(B, H, T, K), draw(B, H, T, V), decay(H)], {}),
    "by channel": lambda: (recurrence, [draw(B, H, T, K), draw(B, H, T, K), draw(B, H, T, V), decay(B, H, T, K)], {}),
    "by channel, grouped": lambda: (recurrence, [draw(B, H, T, K), draw(B, 2, T, K), draw(B, 2, T, V), decay(B, 2, T, K)], {}),
    "bonus": lambda: (recurrence, [draw(B, H, T, K), draw(B, H, T, K), draw(B, H, T, V), decay(B, H, T, K)], {"bonus": draw(H, K)}),
    "delta": lambda: (delta_rule, [draw(B, 2, T, K), draw(B, 2, T, K), draw(B, H, T, V), draw(B, H, T), None], {}),
    "gated delta": lambda: (delta_rule, [draw(B, 2, T, K), draw(B, 2, T, K), draw(B, H, T, V), draw(B, H, T), decay(B, H, T)], {}),
    "kda": lambda: (delta_rule, [draw(B, H, T, K), draw(B, H, T, K), draw(B, H, T, V), draw(B, H, T), decay(B, H, T, K)], {}),
    "rwkv7": lambda: (rwkv7, [draw(B, H, T, K), decay(B, H, T, K), draw(B, H, T, K), draw(B, H, T, V), draw(B, H, T, K), draw(B, H, T, K)], {}),
}


@pytest.mark.parametrize("kernels", [stand_in, pytest.param(by_fla_itself, marks=pytest.mark.slow)])
@pytest.mark.parametrize("at", ["training", "prefill", "documents", "documents and a past"])
@pytest.mark.parametrize("case", CASES)
def test_a_call_of_fla_is_the_specification(case, at, kernels, monkeypatch):
    """Outputs, last states, every gradient."""
    if kernels is by_fla_itself and case in ("no decay", "bonus", "delta", "rwkv7"):
        pytest.skip("fla's plain function of it has no such option (its own tests: test_recurrence, test_delta_rule, test_rwkv)")
    torch.manual_seed(0)
    f, x, options = CASES[case]()
    past = at in ("prefill", "documents and a past")
    if at.startswith("documents"):
        where = Positions(B, T, CPU, PACKED)
    else:
        where = Positions(B, T, CPU, None, torch.full((B,), 3) if past else None, 3 if past else 0)
    heads = x[3 if f is rwkv7 else 2].shape[1]
    h = draw(B, heads, K, V) if past else None
    leaves = [t for t in (*x, h, *options.values()) if t is not None]

    def results(backend):
        y, end = f(*x, where, h=h, backend=backend, **options)
        y = y * (where.pos >= 0)[:, None, :, None]
        torch.manual_seed(1)
        loss = (y * torch.randn(y.shape)).sum() + (end * torch.randn(end.shape)).sum()
        return y, end, torch.autograd.grad(loss, leaves)

    want, called = results("naive"), []
    monkeypatch.setattr(fla, "takes", lambda *a: True)
    monkeypatch.setattr(fla, "kernel", lambda name: called.append(name) or kernels(name))
    torch.testing.assert_close(results("auto"), want, rtol=1e-4, atol=1e-5)
    assert len(called) == 1 and called[0] in fla.MODULES
