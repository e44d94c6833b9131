"""Attention: every backend against the reference, the reference against torch, and who sees whom."""

import types

import pytest
import torch
import torch.nn.functional as F
from conftest import tokens  # noqa: F401

from ops import attend as module
from ops.attend import How, attend, choose
from ops.flash import refuses
from ops.positions import Keys, Positions, visible

CPU = torch.device("cpu")
PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [-1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]])


def qkv(B=2, H=4, G=4, T=16, S=None, D=8, V=None, grad=False):
    g = torch.Generator().manual_seed(0)
    shapes = (B, H, T, D), (B, G, S or T, D), (B, G, S or T, V or D)
    return [(torch.randn(*s, generator=g) * 1.5).requires_grad_(grad) for s in shapes]


def long_packed(T):
    return torch.cat([PACKED, torch.arange(16, T).expand(2, -1) - torch.tensor([[12], [3]])], 1)


SINK = torch.tensor([0.0, 1.0, -1.0, 2.0])
CASES = {
    "causal": {}, "window": dict(window=5), "sinks": dict(window=5, sinks=2), "wide window": dict(window=100), "scale": dict(scale=0.3),
    "alibi": dict(slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])), "alibi window": dict(slopes=torch.tensor([0.5, 0.25, 0.1, 0.05]), window=6),
    "softcap": dict(softcap=2.0), "keep": dict(keep=torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) > 0.3),
    "bidirectional": dict(causal=False), "bidirectional window": dict(causal=False, window=4), "sink logit": dict(sink_logit=SINK),
    "sink logit window": dict(sink_logit=SINK, window=5, sinks=2), "sink logit alibi": dict(sink_logit=SINK, slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])),
    "sink logit all": dict(sink_logit=SINK, scale=0.3, softcap=2.0, keep=torch.rand(16, 16, generator=torch.Generator().manual_seed(1)) > 0.3),
}


@pytest.mark.parametrize("G", [4, 2, 1])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "flex", "auto"])
def test_backends_equal_the_reference(backend, case, pos, G):
    q, k, v = qkv(G=G, V=6)
    at = lambda: Positions(2, 16, CPU, pos)
    want = attend(q, k, v, at(), backend="reference", **CASES[case])
    got = attend(q, k, v, at(), backend=backend, **CASES[case])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    if pos is not None:
        assert (got[1, :, :3] == 0).all(), "a query that sees nothing gives 0"


@pytest.mark.parametrize("case", ["causal", "window", "sinks", "alibi window", "sink logit", "sink logit window", "sink logit alibi"])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_gradients_equal_the_references(case, pos):
    grads = []
    for backend in ("reference", "sdpa"):
        q, k, v = qkv(G=2, grad=True)
        how = dict(CASES[case])
        sink = [how.setdefault("sink_logit", SINK.clone().requires_grad_())] if how.pop("sink_logit", None) is not None else []
        y = attend(q, k, v, Positions(2, 16, CPU, pos), backend=backend, **how)
        grads.append(torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), (q, k, v, *sink)))
    for a, b in zip(*grads):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sinks, logit", [(0, False), (3, False), (0, True), (3, True)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("T", [65, 128, 200])
def test_banded_windows_equal_the_reference_forward_and_backward(T, given, sinks, logit):
    grads = []
    for backend in ("reference", "sdpa"):
        (q, k, v), b = qkv(T=T, G=2, grad=True), SINK.clone().requires_grad_()
        at = Positions(2, T, CPU, long_packed(T) if given else None)
        y = attend(q, k, v, at, backend=backend, window=9, sinks=sinks, sink_logit=b if logit else None)
        assert any(key[0] == "band" for key in at.memo if isinstance(key, tuple)) == (backend == "sdpa" and not (given and sinks))
        grads.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v, b) if logit else (q, k, v))))
    for a, b in zip(*grads):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scores", [1, 1 << 15])
@pytest.mark.parametrize("window", [9, 70])
def test_bands_in_small_chunks_equal_the_reference_forward_and_backward(monkeypatch, window, scores):
    """Three documents, one longer than two windows; 1 score at a time is one block of queries at a time."""
    monkeypatch.setattr("ops.bands.SCORES", scores)
    at = Positions(1, 260, CPU, torch.cat([torch.arange(t) for t in (180, 1, 79)])[None])
    grads = []
    for backend in ("reference", "sdpa"):
        q, k, v = qkv(B=1, T=260, G=2, grad=True)
        y = attend(q, k, v, at, backend=backend, window=window)
        grads.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v))))
    for a, b in zip(*grads):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=5e-6)


def test_a_window_costs_memory_linear_in_the_length():
    """The largest tensor of the banded path at T = 4096 is far below a T x T mask."""
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    q, k, v = qkv(B=1, H=1, G=1, T=4096)
    with Watch():
        attend(q, k, v, Positions(1, 4096, CPU), window=32)
        attend(q, k, v, Positions(1, 4096, CPU), window=32, sink_logit=SINK[:1])
        attend(q, k, v, Positions(1, 4096, CPU), sink_logit=SINK[:1])
    assert max(sizes) < 4096 * 4096 / 8


def test_the_reference_is_what_torch_says():
    q, k, v = qkv(G=2)
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    got, w, lse = attend(q, k, v, Positions(2, 16, CPU), backend="reference", need_weights=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(w.sum(-1), torch.ones(2, 4, 16))
    scores = (q @ k.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_a_sink_logit_takes_weight_and_gives_nothing():
    q, k, v = qkv()
    b = torch.tensor([0.0, 1.0, -1.0, 2.0])
    plain, _, lse = attend(q, k, v, Positions(2, 16, CPU), need_weights=True)
    got = attend(q, k, v, Positions(2, 16, CPU), sink_logit=b)
    torch.testing.assert_close(got, plain * torch.sigmoid(lse - b[:, None])[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, digits", [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_a_number_in_parts_is_whole(dtype, digits):
    x = (torch.randn(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 1000).requires_grad_()
    p = module.parts(x, dtype)
    assert p.dtype == dtype and p.shape == (100, -(-32 // digits))
    assert (p.double().sum(-1) - x).abs().max() <= 1000 * 4 * 2 ** -(30 if dtype != torch.float16 else 24)      # float16 ends at 6e-8
    assert torch.equal(torch.autograd.grad(p.double().sum(), x)[0], torch.ones_like(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_a_sink_logit_is_told_exactly_in_half_precision_and_no_other_score_changes(dtype, causal):
    q, k, v = (t.to(dtype) for t in qkv(G=2))
    b = torch.tensor([7.03, -7.01, 0.1, 30.003])
    q2, k2, v2, how = module.with_sink(q, k, v, How(sink_logit=b), causal)
    scores = lambda q, k: q.double() @ k.double().repeat_interleave(2, 1).mT * 8**-0.5
    s = scores(q2, k2)[:, :, causal:]
    assert how.sink_logit is None and how.scale == 8**-0.5 and (v2[:, :, 0] == 0).all()
    torch.testing.assert_close(s[..., 0], b.double()[:, None].expand(2, 4, 16), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(s[..., 1:], scores(q, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("T, how", [(100, {}), (300, {}), (300, dict(window=9)), (100, dict(window=9))])
def test_a_sink_logit_in_bfloat16_is_near_the_reference_forward_and_backward(T, how):
    grads = []
    for backend in ("reference", "sdpa"):
        (q, k, v), b = (t.detach().to(torch.bfloat16).requires_grad_() for t in qkv(G=2, T=T)), (SINK * 1.3).requires_grad_()
        y = attend(q, k, v, Positions(2, T, CPU), backend=backend, sink_logit=b, **how)
        grads.append((y, *torch.autograd.grad(y.float().sin().sum(), (q, k, v, b))))
    for a, b in zip(*grads):
        assert (a - b).abs().mean() < 0.02 * a.abs().mean()


def test_visible_is_the_literal_table():
    """T = 6, window 3, one sink, two documents of 4 and 2."""
    pos, doc = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 0, 0, 0, 1, 1])
    see = visible(pos[:, None], pos, doc[:, None], doc, window=2, sinks=1)
    table = ["1.....", "11....", "111...", "1.11..", "....1.", "....11"]
    assert ["".join("1" if s else "." for s in row) for row in see.tolist()] == table


def test_weights_and_dropout_and_masks_without_nan():
    q, k, v = qkv(grad=True)
    y = attend(q, k, v, Positions(2, 16, CPU, torch.full((2, 16), -1)))
    assert (y == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


def test_dropout_has_the_same_mean_in_every_backend():
    q, k, v = qkv(B=1, H=2, G=2)
    want = attend(q, k, v, Positions(1, 16, CPU))
    for backend in ("reference", "sdpa"):
        torch.manual_seed(0)
        mean = torch.stack([attend(q, k, v, Positions(1, 16, CPU), backend=backend, dropout=0.3) for _ in range(3000)]).mean(0)
        torch.testing.assert_close(mean, want, rtol=0.1, atol=0.1)


def test_what_a_backend_cannot_do_falls_to_the_next_with_one_line(capsys):
    module.say_once.cache_clear()
    q, k, v = qkv(grad=True)
    for _ in range(3):
        attend(q, k, v, Positions(2, 16, CPU), backend="flex")
        attend(q, k, v, Positions(2, 16, CPU), backend="flash", softcap=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["attention backend flex: flex has no backward on CPU; sdpa takes its place",
                     "attention backend flash: flash takes half precision on CUDA only; reference takes its place"]


@pytest.mark.parametrize("device, how, plain, dtype, want", [
    ("cuda", How(), True, torch.bfloat16, "sdpa"), ("cuda", How(window=8), True, torch.bfloat16, "flash"), ("cuda", How(window=8), True, torch.float32, "flex"),
    ("cuda", How(), False, torch.bfloat16, "flash"), ("cuda", How(softcap=1.0), True, torch.bfloat16, "flash"), ("cuda", How(dropout=0.1), False, torch.bfloat16, "flash"),
    ("cuda", How(keep=lambda q, k, h: k >= 0), False, torch.bfloat16, "flex"), ("cuda", How(window=8, sinks=2, dropout=0.1), True, torch.bfloat16, "sdpa"),
    ("cpu", How(window=8), True, torch.float32, "sdpa"), ("cpu", How(softcap=1.0), True, torch.float32, "reference"), ("mps", How(), False, torch.float32, "sdpa"),
    ("cuda", How(need_weights=True), True, torch.bfloat16, "reference"), ("cuda", How(softcap=1.0, dropout=0.1), True, torch.bfloat16, "reference"),
    ("cuda", How(slopes=torch.ones(1)), True, torch.float32, "flex"), ("cuda", How(window=8, sink_logit=torch.ones(1)), True, torch.bfloat16, "flex"),
    ("cuda", How(sink_logit=torch.ones(1)), True, torch.bfloat16, "sdpa"), ("cpu", How(sink_logit=torch.ones(1)), False, torch.float32, "sdpa"),
])
def test_auto_takes_what_fits(monkeypatch, device, how, plain, dtype, want):
    monkeypatch.setattr(module, "version", lambda: 2)
    assert choose("auto", device, dtype, 64, how, plain) == want


def test_auto_stays_clear_of_kernels_limits(monkeypatch):
    assert choose("auto", "cuda", torch.bfloat16, 64, How(window=4)) == "flex"                  # no package
    monkeypatch.setattr(module, "version", lambda: 3)
    assert choose("auto", "cuda", torch.bfloat16, 64, How()) == "flash"
    assert choose("auto", "cuda", torch.bfloat16, 64, How(window=4, dropout=0.1)) == "sdpa"
    assert choose("auto", "cuda", torch.bfloat16, 64, How(slopes=torch.ones(1))) == "flex"
    monkeypatch.setattr(module, "version", lambda: 4)
    assert choose("auto", "cuda", torch.bfloat16, 192, How(window=4)) == "flex"
    monkeypatch.setattr(module, "version", lambda: 2)
    assert choose("auto", "cuda", torch.bfloat16, 64, How(), plain=False, past=True) == "flex"
    assert choose("auto", "cuda", torch.bfloat16, 8, How(window=4), plain=False) == "flash"
    assert choose("auto", "cuda", torch.bfloat16, 12, How(window=4), plain=False) == "sdpa"
    assert choose("auto", "cuda", torch.bfloat16, 512, How(window=4)) == "flex"
    assert choose("auto", "cuda", torch.bfloat16, 64, How(window=4), grad=False) == "sdpa"


def stand_in(version: int) -> types.SimpleNamespace:
    """The documented interface of a flash-attn package, computed plainly: (B, T, H, D), or all tokens in one row with the ends of
    its sequences; a window without the query itself; 2 alone has dropout and ALiBi, 4 gives the log-sum-exp too."""
    def one(q, k, v, softmax_scale, causal, softcap, window_size=(-1, -1), dropout_p=0.0, alibi_slopes=None):      # (T, H, D)
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        T, n = q.shape[1], q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(n, 0), v.repeat_interleave(n, 0)
        i, j = torch.arange(T)[:, None], torch.arange(T)
        s = q @ k.mT * (softmax_scale or q.shape[-1] ** -0.5)
        s = softcap * (s / softcap).tanh() if softcap else s
        s = s if alibi_slopes is None else s - alibi_slopes[:, None, None] * (i - j).abs()
        see = (j <= i) & ((j >= i - window_size[0]) if window_size[0] >= 0 else True)
        assert causal and window_size[1] in (0, -1) and dropout_p == 0
        return (s.masked_fill(~see, -torch.inf).softmax(-1) @ v).transpose(0, 1)

    def given(y, options):
        assert version == 2 or not {"dropout_p", "alibi_slopes"} & set(options)
        return (y, None) if version == 4 else y

    def flash_attn_func(q, k, v, **options):
        return given(torch.stack([one(*row, **options) for row in zip(q, k, v)]), options)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options):
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        ends = cu_seqlens_q.tolist()
        assert ends[0] == 0 and ends[-1] == len(q) and max(b - a for a, b in zip(ends, ends[1:])) == max_seqlen_q == max_seqlen_k
        return given(torch.cat([one(q[a:b], k[a:b], v[a:b], **options) for a, b in zip(ends, ends[1:])]), options)

    return types.SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("how", [{}, dict(window=5), dict(softcap=2.0), dict(slopes=CASES["alibi"]["slopes"]), dict(scale=0.3)])
def test_flash_is_called_with_its_own_conventions(monkeypatch, how, version, pos):
    if "slopes" in how and version > 2:
        assert refuses(version, 8, 0.0, 0.0, True)
        return
    monkeypatch.setattr("ops.flash.INSTALLED", {version: stand_in(version)})
    monkeypatch.setattr("ops.flash.version", lambda: version)
    q, k, v = qkv(G=2)
    v = v[..., :5]
    at = Positions(2, 16, CPU, pos)
    got = module.flash(q, k, v, at, at.keys_new(), How(**how))
    torch.testing.assert_close(got, attend(q, k, v, at, backend="reference", **how), rtol=1e-5, atol=2e-6)


def test_keys_of_a_past_are_told_by_their_positions():
    """4 new queries on a past of 12: bottom-right, not top-left."""
    q, k, v = qkv(T=4, S=16)
    at = Positions(2, 4, CPU, length=torch.tensor([12, 12]), past=12)
    keys = Keys("test", torch.arange(16).expand(2, 16), torch.zeros(2, 16, dtype=torch.long))
    full = attend(torch.cat([torch.zeros(2, 4, 12, 8), q], 2), k, v, Positions(2, 16, CPU))[:, :, 12:]
    for backend in ("reference", "sdpa", "flex"):
        torch.testing.assert_close(attend(q, k, v, at, keys=keys, backend=backend), full, rtol=1e-5, atol=2e-6)


def test_short_rows_in_bfloat16_are_near_the_reference_forward_and_backward():
    grads = []
    for backend in ("reference", "sdpa"):
        q, k, v = (t.detach().to(torch.bfloat16).requires_grad_() for t in qkv(G=2, T=100))
        y = attend(q, k, v, Positions(2, 100, CPU), backend=backend, scale=0.3)
        grads.append((y, *torch.autograd.grad(y.float().sin().sum(), (q, k, v))))
    for a, b in zip(*grads):
        assert (a - b).abs().mean() < 0.02 * a.abs().mean()
