"""The delta rule: chunks against the loop over tokens, and both against transformers' and fla's."""

import importlib.metadata
import importlib.util

import pytest
import torch
import torch.nn.functional as F

import ops.delta_rule as module
from ops.delta_rule import delta_rule
from ops.positions import Positions

CPU = torch.device("cpu")
KINDS = ["none", "head", "channel"]


def inputs(kind, T, B=3, G=2, H=4, K=8, V=6, dtype=torch.float64, like="random"):
    """q, k, v, beta, log_decay, h as leaves."""
    gen = torch.Generator().manual_seed(T)

    def normal(*s):
        return torch.randn(*s, generator=gen, dtype=dtype)
    g = -F.softplus(normal(B, H, T) if kind == "head" else normal(B, H, T, K))
    beta = normal(B, H, T).sigmoid()
    if like == "extreme":                                      # nothing fades, everything does, nothing is written, all is overwritten
        g, beta = torch.where(normal(*g.shape) > 0, 0.0, -50.0).to(dtype), (normal(*beta.shape) > 0).to(dtype)
    if like == "faded":
        g = torch.full_like(g, -50)
    every = [normal(B, G, T, K), F.normalize(normal(B, G, T, K), dim=-1), normal(B, H, T, V), beta, None if kind == "none" else g, normal(B, H, K, V)]
    return [t if t is None else t.requires_grad_() for t in every]


def packed(T):
    """A document that goes on, borders inside it, left and right padding, and nothing but padding."""
    pos = torch.arange(T).expand(4, T).clone()
    pos[0] += 7
    pos[0, T // 3:] = torch.arange(T - T // 3)
    pos[1, :2], pos[1, 2:] = -1, torch.arange(T - 2)
    pos[2, T // 2:], pos[2, -1] = torch.arange(T - T // 2), -1
    pos[3] = -1
    return pos


def numbers(backend, ins, at):
    """Outputs, final state, and the gradient of each input; what padding reads counts for nothing."""
    q, k, v, beta, g, h = ins
    y, h = delta_rule(q, k, v, beta, g, at, h, backend)
    y = y * (at.pos >= 0)[:, None, :, None]
    loss = (y * torch.arange(y.numel()).view_as(y).sin()).sum() + (h * torch.arange(h.numel()).view_as(h).cos()).sum()
    return [y.detach(), h.detach(), *torch.autograd.grad(loss, [t for t in ins if t is not None])]


@pytest.mark.parametrize("pos", ["plain", "packed"])
@pytest.mark.parametrize("T", [2, 5, 64, 70, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_the_loop(kind, T, pos, monkeypatch):
    """Also over the border of two segments, which train by recomputation."""
    monkeypatch.setattr(module, "SEGMENT", 128)
    at, ins = Positions(4, T, CPU, packed(T) if pos == "packed" and T > 4 else None), inputs(kind, T, B=4)
    for got, want in zip(numbers("chunked", ins, at), numbers("naive", ins, at)):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("like", ["extreme", "faded"])
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_gates_are_exact_in_float32(kind, like):
    """Log decays of -50 and 0, beta of 0 and 1: no overflow, and no digits lost in differences of sums."""
    at, ins = Positions(3, 150, CPU), inputs(kind, 150, dtype=torch.float32, like=like)
    exact = [t if t is None else t.detach().double().requires_grad_() for t in ins]
    for got, want in zip(numbers("chunked", ins, at), numbers("naive", exact, at)):
        assert got.isfinite().all() and (got - want).abs().max() < 1e-5 * max(1, want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_small_decays_after_large_ones_keep_their_digits(kind):
    """After 40 decays of -50 a cumulative sum in float32 is 1e-4 coarse; sums between two tokens are not."""
    at, ins = Positions(3, 64, CPU), inputs(kind, 64, dtype=torch.float32)
    if kind != "none":
        g = torch.full_like(ins[4], -0.01)
        g[:, :, :40] = -50
        ins[4] = g.requires_grad_()
    exact = [t if t is None else t.detach().double().requires_grad_() for t in ins]
    for got, want in zip(numbers("chunked", ins, at), numbers("naive", exact, at)):
        assert (got - want).abs().max() < 3e-6 * max(1, want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_by_finite_differences(kind):
    ins = inputs(kind, 11, B=1, G=1, H=2, K=3, V=2)
    at = Positions(1, 11, CPU, torch.tensor([[4, 5, 0, 1, 2, 0, 1, 2, 3, 4, -1]]))
    some = [i for i, t in enumerate(ins) if t is not None]

    def run(*given):
        full = list(ins)
        for i, t in zip(some, given):
            full[i] = t
        y, h = delta_rule(*full[:5], at, full[5])
        return y[:, :, :10], h
    assert torch.autograd.gradcheck(run, [ins[i] for i in some])


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_goes_on_in_pieces(kind):
    q, k, v, beta, g, h = (t if t is None else t.detach() for t in inputs(kind, 150))
    want, end = delta_rule(q, k, v, beta, g, Positions(3, 150, CPU), h)
    out, a = [], 0
    for n in [70, 1, 1, 13, 64, 1]:
        b = a + n
        y, h = delta_rule(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], beta[:, :, a:b], None if g is None else g[:, :, a:b], Positions(3, n, CPU), h)
        out, a = out + [y], b
    torch.testing.assert_close(torch.cat(out, 2), want, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(h, end, rtol=1e-10, atol=1e-11)


def test_it_computes_in_float32_whatever_it_is_given():
    """bfloat16 inputs, autocast: as their values in float32."""
    ins = [t.detach() for t in inputs("channel", 100, dtype=torch.float32)]
    low = [t.bfloat16() for t in ins[:5]]
    want, _ = delta_rule(*(t.float() for t in low), Positions(3, 100, CPU), ins[5])
    with torch.autocast("cpu", torch.bfloat16):
        got, h = delta_rule(*low, Positions(3, 100, CPU), ins[5])
    assert got.dtype == h.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_heads_that_share_no_keys_evenly_are_refused():
    with pytest.raises(ValueError, match="4 value heads are no multiple of 3"):
        delta_rule(*inputs("head", 5, G=3)[:5], Positions(3, 5, CPU))


# oracles: (B, T, H, D) and a scale of K^-0.5 in both; transformers' own functions only where fla does not replace them

def other(run, ins, heads_first=False):
    """Their output, state and gradients, in our layout: run(q, k, v, beta, g, h) in theirs."""
    q, k, v, beta, g, h = ins
    turned = [t if heads_first or t is None else t.transpose(1, 2) for t in (q, k, v, beta, g)]
    y, h = run(*turned, h)
    y = (y if heads_first else y.transpose(1, 2)) * q.shape[-1] ** 0.5
    loss = (y * torch.arange(y.numel()).view_as(y).sin()).sum() + (h * torch.arange(h.numel()).view_as(h).cos()).sum()
    return [y.detach(), h.detach(), *torch.autograd.grad(loss, [t for t in ins if t is not None])]


def compare(ins, want):
    for got, t in zip(numbers("chunked", ins, Positions(*ins[3].shape[::2], CPU)), want):
        assert (got - t).abs().max() < 1e-5 * max(1, t.abs().max())


@pytest.mark.parametrize("form", ["torch_chunk", "torch_recurrent"])
@pytest.mark.parametrize("kind", ["none", "head"])
def test_it_is_transformers_gated_delta_rule(kind, form):
    assert not importlib.util.find_spec("fla"), "transformers would run fla's kernels instead of its own functions"
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = getattr(qwen, form + "_gated_delta_rule")
    ins = inputs(kind, 150, dtype=torch.float32)

    def run(q, k, v, beta, g, h):
        q, k = (t.repeat_interleave(2, 2) for t in (q, k))
        return theirs(q, k, v, g=torch.zeros_like(beta) if g is None else g, beta=beta, initial_state=h, output_final_state=True)
    compare(ins, other(run, ins))


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_it_is_transformers_kimi_delta_attention(form):
    assert not importlib.util.find_spec("fla"), "transformers would run fla's kernels instead of its own functions"
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    theirs = getattr(kimi, form + "_kimi_delta_attention")
    ins = inputs("channel", 150, G=4, dtype=torch.float32)
    compare(ins, other(lambda q, k, v, beta, g, h: theirs(q, k, v, g=g, beta=beta, initial_state=h, output_final_state=True), ins))


def fla(name):
    """One of fla-core's files of plain torch, on its own: the package must not be importable, or transformers runs its kernels."""
    try:
        path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{name}/naive.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("fla-core is not installed: pip install --no-deps fla-core einops into a folder of sys.path")
    pytest.importorskip("einops")
    spec = importlib.util.spec_from_file_location("fla_naive_" + name, path)
    spec.loader.exec_module(file := importlib.util.module_from_spec(spec))
    return file


@pytest.mark.parametrize("name, kind, function", [
    ("delta_rule", "none", "delta_rule_recurrence"), ("gated_delta_rule", "head", "naive_recurrent_gated_delta_rule"),
    ("gated_delta_rule", "head", "naive_chunk_gated_delta_rule"), ("kda", "channel", "naive_recurrent_kda"), ("kda", "channel", "naive_chunk_kda")])
def test_it_is_fla_s(name, kind, function):
    theirs = getattr(fla(name), function)
    ins = inputs(kind, 128, G=4, dtype=torch.float32)              # its chunked forms take whole chunks of 64

    def run(q, k, v, beta, g, h):
        decay = {} if g is None else dict(g=g)
        return theirs(q=q, k=k, v=v, beta=beta[..., None] if g is None else beta, **decay, initial_state=h, output_final_state=True)
    compare(ins, other(run, ins, heads_first=kind == "none"))
