"""The recurrence: its chunked form against the loop over tokens, and flash-linear-attention's naive forms (outputs, last states, gradients)."""

import importlib.util

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ops import recurrence as module
from ops.positions import Positions
from ops.recurrence import recurrence

CPU = torch.device("cpu")
T, K, V = 150, 8, 6


def rows(*lengths):
    """Positions of documents of these lengths; a negative one is padding."""
    return torch.cat([torch.full((-n,), -1) if n < 0 else torch.arange(n) for n in lengths])


PACKED = torch.stack([rows(150), rows(64, 1, 85), rows(-20, 100, 30), rows(-3, 60, 70, -17), rows(-150)])
HEADS = {"heads of their own": (4, 4, 4), "shared q and k": (2, 2, 4), "shared k and v": (4, 2, 2)}      # of q, k, v


def inputs(decay, bonus, heads=(4, 4, 4), dtype=torch.float64, B=5, T=T, rate=2.0):
    g = torch.Generator().manual_seed(0)
    def rand(*shape, of=torch.randn):
        return of(*shape, generator=g, dtype=dtype)
    Hq, Hk, Hv = heads
    shape = {"none": None, "head": (Hv,), "token": (B, Hv, T), "channel": (B, Hv, T, K)}[decay]
    a = None if shape is None else -rate * rand(*shape, of=torch.rand)
    out = [rand(B, Hq, T, K), rand(B, Hk, T, K), rand(B, Hv, T, V), a, rand(max(heads), K) if bonus else None, rand(B, Hv, K, V)]
    return [t if t is None else t.requires_grad_() for t in out]


def results(q, k, v, a, u, h, pos, backend, dtype=None, autocast=False):
    """y, the last state, and the gradients of all that is given."""
    B, T = v.shape[0], v.shape[2]
    cast = [t if t is None or dtype is None else t.to(dtype) for t in (q, k, v, a)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, last = recurrence(*cast, Positions(B, T, CPU, pos), u, h, backend)
    if pos is not None:
        y = y * (pos >= 0)[:, None, :, None]
    loss = (y * torch.arange(y.numel()).view_as(y).sin()).sum() + (last * torch.arange(last.numel()).view_as(last).cos()).sum()
    return [y.detach(), last.detach(), *torch.autograd.grad(loss, [t for t in (q, k, v, a, u, h) if t is not None])]


def assert_same(got, want, most):
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all() and (a - b).abs().max() <= most * max(1, b.abs().max())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
@pytest.mark.parametrize("decay", ["none", "head", "token", "channel"])
def test_chunks_are_the_loop(monkeypatch, decay, bonus, pos, heads):
    """To rounding in float64, many groups of chunks, the gradients of every input with them."""
    monkeypatch.setattr(module, "ROWS", 5 * 4 * 64)
    x = inputs(decay, bonus, HEADS[heads])
    assert_same(results(*x, pos, "chunked"), results(*x, pos, "naive"), 1e-12)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_every_length(decay):
    for n in [*range(1, 20), 31, 32, 33, 63, 64, 65, 127, 128, 129]:
        x = inputs(decay, True, T=n, B=2)
        assert_same(results(*x, None, "chunked"), results(*x, None, "naive"), 1e-12)


@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_the_loop_is_a_sum_over_pairs(decay, bonus):
    """y_t = sum over s <= t of (sum over c of q_tc k_sc exp(a_(s+1)c + ... + a_tc)) v_s, by the definition, with neither state nor chunk."""
    q, k, v, a, u, _ = inputs(decay, bonus, B=2, T=9)
    y, _ = recurrence(q, k, v, a, Positions(2, 9, CPU), u, backend="naive")
    for t in range(9):
        want = torch.zeros(2, 4, V, dtype=torch.float64)
        for s in range(t + 1):
            fade = a[:, :, s + 1:t + 1 - bonus].sum(2).exp()
            fade = fade[..., None] if decay == "token" else fade
            w = q[:, :, t] * k[:, :, s] * (u if bonus and s == t else fade)
            want = want + w.sum(-1, keepdim=True) * v[:, :, s]
        torch.testing.assert_close(y[:, :, t], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bonus", [False, True], ids=["", "bonus"])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_extreme_gates(decay, bonus):
    """Log decays of -50 beside those of 0 and -0.01, and nothing but either: sums reach -7,500, and none costs the others a digit."""
    x = inputs(decay, bonus)
    pick = torch.randint(3, x[3].shape, generator=torch.Generator().manual_seed(1))
    for a in (torch.tensor([-50.0, 0.0, -0.01])[pick], torch.full_like(x[3], -50), torch.zeros_like(x[3]), torch.full_like(x[3], -1e4)):
        in_double = [*x[:3], a.double().requires_grad_(), *x[4:]]
        in_float = [t if t is None else t.detach().float().requires_grad_() for t in in_double]
        assert_same(results(*in_float, PACKED, "chunked"), results(*in_double, PACKED, "naive"), 2e-5)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_a_long_row_in_float32_is_the_loop_in_float64(decay):
    x = inputs(decay, False, B=1, T=3000, rate=0.02, heads=(1, 1, 1))
    in_float = [t if t is None else t.detach().float().requires_grad_() for t in x]
    assert_same(results(*in_float, None, "chunked"), results(*x, None, "naive"), 2e-5)


@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_float32_inside_whatever_comes_in(backend):
    x = inputs("channel", True, dtype=torch.float32)
    rounded = [t if i > 3 else t.detach().bfloat16().float().requires_grad_() for i, t in enumerate(x)]
    want = results(*rounded, PACKED, backend)
    got = results(*rounded, PACKED, backend, torch.bfloat16)
    assert got[0].dtype == got[1].dtype == torch.float32
    assert_same(got[:2], want[:2], 1e-6)
    assert_same(got[2:], want[2:], 1e-2)           # gradients pass through bfloat16
    assert_same(results(*rounded, PACKED, backend, autocast=True), want, 0)


@pytest.mark.parametrize("pieces", [[150], [1] * 150, [63, 1, 66, 20], [5, 100, 45]])
@pytest.mark.parametrize("decay", ["token", "channel"])
def test_the_state_of_a_piece_is_the_start_of_the_next(decay, pieces):
    q, k, v, a, u, h = (t.detach() for t in inputs(decay, True))
    want, last = recurrence(q, k, v, a, Positions(5, T, CPU, PACKED), u, h, "naive")
    out, i = [], 0
    for n in pieces:
        part = slice(i, i + n)
        y, h = recurrence(*(t[:, :, part] for t in (q, k, v, a)), Positions(5, n, CPU, PACKED[:, part]), u, h)
        out, i = out + [y], i + n
    real = (PACKED >= 0)[:, None, :, None]
    torch.testing.assert_close(torch.cat(out, 2) * real, want * real, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(h, last, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_documents_leave_exactly_nothing_on_one_another(decay):
    q, k, v, a, _, h = inputs(decay, False, dtype=torch.float32)
    y, last = recurrence(q, k, v, a, Positions(5, T, CPU, PACKED), h=h)
    for t, seen in [(63, slice(0, 64)), (64, slice(64, 65)), (100, slice(65, 101))]:          # of row 1: documents of 64, 1 and 85
        grads = torch.autograd.grad(y[1, :, t].square().sum(), (q, k, v, a), retain_graph=True)
        for g in grads:
            reached = g.reshape(5, 4, T, -1).abs().sum((1, 3))
            outside = torch.ones(5, T, dtype=torch.bool)
            outside[1, seen] = False
            assert not reached[outside].any()
    (g,) = torch.autograd.grad(last.square().sum(), a)
    assert not g[1, :, :66].any() and g[1, :, 66:].any() and not g[4].any()


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_memory_is_linear_in_the_length(decay):
    """No tensor is larger than an input, or than what some chunks need."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    n = 65536
    q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
    a = (-torch.rand(1, 1, n) if decay == "token" else -torch.rand(1, 1, n, 16)).requires_grad_()
    with Watch():
        y, _ = recurrence(q, k, v, a, Positions(1, n, CPU))
        y.sum().backward()
    assert max(sizes) <= max(n * 16, module.ROWS * 64)


def test_heads_that_do_not_fit_are_one_line():
    with pytest.raises(ValueError, match="recurrence: 4 heads of q and 3 of v must be multiples of the 2 of k"):
        recurrence(torch.ones(1, 4, 5, 2), torch.ones(1, 2, 5, 2), torch.ones(1, 3, 5, 2), None, Positions(1, 5, CPU))


# flash-linear-attention

def naive_form(name):
    """fla/ops/NAME/naive.py alone: the package itself wants Triton."""
    pytest.importorskip("einops")
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("pip install --no-deps fla-core")
    spec = importlib.util.spec_from_file_location(f"fla_{name}_naive", f"{spec.submodule_search_locations[0]}/ops/{name}/naive.py")
    out = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(out)
    return out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.parametrize("op", ["linear_attn", "linear_attn normalised", "retention", "gla", "simple_gla", "simple_gla parallel"])
def test_equals_flash_linear_attentions_naive_forms(op):
    """(B, T, H, D) there, but retention's (B, H, T, D); with a state before and after where it has one."""
    name = op.split()[0]
    fla, n = naive_form(name), 75
    q, k, v, a, _, h = inputs("channel" if name == "gla" else "token", False, dtype=torch.float32, B=2, T=n)
    if op == "linear_attn normalised":
        q, k = (t.detach().abs().requires_grad_() for t in (q, k))
    def swap(t):
        return t.transpose(1, 2)
    at, scale, last = Positions(2, n, CPU), K**-0.5, torch.zeros(2)
    none = torch.zeros(2)
    if name == "retention":
        y, last_ = fla.naive_retention(q, k, v), none
        got, _ = recurrence(q * scale, k, v, torch.log1p(-torch.exp2(-5.0 - torch.arange(4))), at)
    elif name == "gla":
        y, last_ = fla.naive_recurrent_gla(*map(swap, (q, k, v, a)), initial_state=h, output_final_state=True)
        got, last = recurrence(q * scale, k, v, a, at, h=h)
    elif op == "simple_gla":
        y, last_ = fla.naive_recurrent_simple_gla(*map(swap, (q, k, v, a)), initial_state=h)
        got, last = recurrence(q * scale, k, v, a, at, h=h)
    elif op == "simple_gla parallel":
        y, last_ = fla.naive_parallel_simple_gla(*map(swap, (q, k, v, a)))[0], none
        got, _ = recurrence(q * scale, k, v, a, at)
    elif op == "linear_attn":
        y, last_ = fla.naive_recurrent_linear_attn(*map(swap, (q, k, v)), initial_state=h, output_final_state=True)
        got, last = recurrence(q * scale, k, v, None, at, h=h)
    else:
        y, last_ = fla.naive_recurrent_linear_attn(*map(swap, (q, k, v)), normalize=True)[0], none
        sums, _ = recurrence(q * scale, k, torch.cat([v, torch.ones(2, 4, n, 1)], -1), None, at)
        got = sums[..., :-1] / sums[..., -1:]
    y = y if name == "retention" else swap(y)
    sides = []
    for out, state in ((got, last), (y, last_)):
        loss = (out * torch.arange(out.numel()).view_as(out).sin()).sum() + (state.sin().sum() if state.requires_grad else 0)
        grads = torch.autograd.grad(loss, (q, k, v, a, h), allow_unused=True)
        sides.append([out.detach(), state.detach(), *(torch.zeros(1) if g is None else g for g in grads)])
    assert_same(*sides, 1e-5)
