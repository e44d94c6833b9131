"""The selective scan: blocks against the loop over tokens, the loop against Hugging Face's, documents, padding, extremes, compilation."""

import pytest
import torch

import ops.scan as module
from ops.positions import Positions
from ops.scan import naive, scan

CPU = torch.device("cpu")
T, E, N = 75, 6, 4                                            # two blocks of 32 tokens and a part


def rows(*lengths):
    """Positions of documents of these lengths; a negative one is padding."""
    return torch.cat([torch.full((-n,), -1) if n < 0 else torch.arange(n) for n in lengths])


PACKED = torch.stack([rows(75), rows(32, 1, 42), rows(-40, 35), rows(-5, 30, 20, -20), rows(-75)])


def inputs(dtype=torch.float32, B=5, T=T):
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=dtype)
    return [draw(B, T, E), draw(B, T, E).exp() / 4, -draw(E, N).exp(), draw(B, T, N), draw(B, T, N), draw(B, N, E)]


def numbers(form, given, at):
    """y, the last state, and the gradients of all that was given."""
    x, dt, A, B, C, h = given = [t.clone().requires_grad_() for t in given]
    if form is naive:
        pad, keep = (at.pos < 0)[..., None], (at.pos != 0).to(x.dtype)
        y, last = naive(x, dt.masked_fill(pad, 0), A, B, C, keep if at.given else None, h)
    else:
        y, last = form(x, dt, A, B, C, at, h)
    real = (at.pos >= 0)[..., None]
    (y * real * torch.arange(y.numel()).view_as(y).sin() * 3).sum().add((last * last).sum()).backward()
    return [(y * real).detach(), last.detach(), *(t.grad for t in given)]


@pytest.mark.parametrize("wide", [2**19, 1, 2 * 32 * E * N], ids=["all rows", "a row at once", "two rows"])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_blocks_are_the_loop_forward_and_backward(pos, wide, monkeypatch):
    monkeypatch.setattr(module, "WIDE", wide)
    at = Positions(5, T, CPU, pos)
    for got, want in zip(numbers(scan, inputs(), at), numbers(naive, inputs(), at)):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_the_loop_is_a_loop_over_channels_and_their_states():
    x, dt, A, B, C, h = inputs(torch.float64, B=1, T=9)
    y, last = naive(x, dt, A, B, C, None, h)
    for e in range(E):
        state, out = h[0, :, e].tolist(), []
        for t in range(9):
            step = float(dt[0, t, e])
            state = [s * 2.718281828459045 ** (step * float(A[e, n])) + step * float(x[0, t, e]) * float(B[0, t, n]) for n, s in enumerate(state)]
            out.append(sum(s * float(C[0, t, n]) for n, s in enumerate(state)))
        torch.testing.assert_close(y[0, :, e], torch.tensor(out, dtype=torch.float64))
        torch.testing.assert_close(last[0, :, e], torch.tensor(state, dtype=torch.float64))


@pytest.mark.parametrize("pieces", [[75], [1] * 75, [31, 1, 33, 10], [64, 11]])
@pytest.mark.parametrize("pos", [None, PACKED[:4]], ids=["plain", "packed"])
def test_pieces_hand_the_state_on(pos, pieces):
    given = inputs(B=4)
    *streams, h = given[0], given[1], given[3], given[4], torch.zeros(4, N, E)
    want, last = scan(streams[0], streams[1], given[2], *streams[2:], Positions(4, T, CPU, pos), h)
    out, i = [], 0
    for n in pieces:
        x, dt, B, C = (t[:, i:i + n] for t in streams)
        y, h = scan(x, dt, given[2], B, C, Positions(4, n, CPU, None if pos is None else pos[:, i:i + n], past=i), h)
        out, i = out + [y], i + n
    real = torch.ones(4, T, dtype=torch.bool) if pos is None else pos >= 0
    torch.testing.assert_close(torch.cat(out, 1)[real], want[real], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(h, last, rtol=1e-5, atol=1e-5)


def test_each_document_is_as_alone_and_padding_leaves_the_state():
    x, dt, A, B, C, h = inputs()
    y, last = scan(x, dt, A, B, C, Positions(5, T, CPU, PACKED), h)
    for row, a, b in [(1, 0, 32), (1, 32, 33), (1, 33, 75), (2, 40, 75), (3, 5, 35), (3, 35, 55)]:
        alone, end = scan(*(t[row:row + 1, a:b] for t in (x, dt)), A, *(t[row:row + 1, a:b] for t in (B, C)), Positions(1, b - a, CPU))
        torch.testing.assert_close(y[row:row + 1, a:b], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(last[3:4], end, rtol=1e-5, atol=1e-6)
    assert torch.equal(last[4], h[4])


def test_gradients_are_those_of_finite_differences():
    at = Positions(3, 35, CPU, torch.stack([rows(35), rows(-3, 20, 12), rows(33, -2)]))
    given = [t.requires_grad_() for t in inputs(torch.float64, B=3, T=35)]
    torch.autograd.gradcheck(lambda x, dt, A, B, C, h: scan(x, dt, A, B, C, at, h), given, fast_mode=True)


@pytest.mark.parametrize("step", [0.0, 1e-8, 50.0, 1e6])
def test_extreme_steps_stay_finite_and_exact(step):
    given, at = inputs(), Positions(5, T, CPU, PACKED)
    given[1][:, 10:40] = step
    for got, want in zip(numbers(scan, given, at), numbers(naive, given, at)):
        assert got.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_autocast_changes_nothing():
    at = Positions(5, T, CPU)
    want = numbers(scan, inputs(), at)
    with torch.autocast("cpu", torch.bfloat16):
        got = numbers(scan, inputs(), at)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_what_is_kept_for_backward_is_linear_with_a_small_factor():
    """x, dt, B, C and a state a block: of 16 numbers of a channel every 32nd is half as much as x."""
    T, E, N, kept = 4096, 64, 16, {}
    given = [torch.rand(1, T, E), torch.rand(1, T, E), -torch.rand(E, N), torch.rand(1, T, N), torch.rand(1, T, N)]
    given = [t.requires_grad_() for t in given]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        scan(*given, Positions(1, T, CPU))
    assert T * E < sum(t.numel() for t in kept.values()) < 3.2 * T * E


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_inductors_gradients_are_eager_s(pos):
    at = Positions(5, T, CPU, pos)
    want = numbers(scan, inputs(), at)
    torch._dynamo.reset()
    for got, right in zip(numbers(torch.compile(scan, fullgraph=True), inputs(), at), want):
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)


def test_the_operation_keeps_torch_s_rules():
    x, dt, A, B, C, h = (t.requires_grad_() for t in inputs())
    for keep in (None, (PACKED != 0).float()):
        torch.library.opcheck(module.blocked, (x, dt, A, B, C, keep, h), test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


def test_the_loop_is_hugging_faces():
    pytest.importorskip("transformers")
    from transformers.models.mamba.modeling_mamba import mamba_selective_scan
    given = inputs()
    given[5].zero_()
    want = [t.clone().requires_grad_() for t in given[:5]]
    x, dt, A, B, C = want
    y, last = mamba_selective_scan(x.mT, dt.mT, A, B.mT, C.mT, return_last_state=True)
    (y.mT * torch.arange(y.numel()).view_as(y.mT).sin() * 3).sum().add((last * last).sum()).backward()
    for a, b in zip(numbers(scan, given, Positions(5, T, CPU)), [y.mT.detach(), last.mT.detach(), *(t.grad for t in want)]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))
