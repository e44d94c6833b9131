"""Token shift and short convolution: against a loop over tokens, whole and in pieces."""

import pytest
import torch
import torch.nn.functional as F

from ops.positions import Positions
from ops.shift import InBlocks, shift, short_conv

CPU = torch.device("cpu")
K = 4


def rows(*lengths):
    """Positions of documents of these lengths; a negative one is padding."""
    return torch.cat([torch.full((-n,), -1) if n < 0 else torch.arange(n) for n in lengths])


PACKED = torch.stack([rows(11), rows(3, 1, 7), rows(-4, 7), rows(-2, 2, 5, -2), rows(-11)])


def by_hand(x, pos, j):
    """x_(t - j) of the same document, or 0."""
    out = torch.zeros_like(x)
    for b, t in torch.cartesian_prod(torch.arange(x.shape[0]), torch.arange(x.shape[1])).tolist():
        if pos[b, t] >= j:
            out[b, t] = x[b, t - j]
    return out


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_shift_is_the_loop(pos):
    x = torch.randn(5, 11, 3)
    given = torch.arange(11).expand(5, 11) if pos is None else pos
    out, _ = shift(x, K - 1, Positions(5, 11, CPU, pos))
    seen = (given >= 0)[..., None]
    for j, got in enumerate(out):
        torch.testing.assert_close(got * seen, by_hand(x, given, j), rtol=0, atol=0)


@pytest.mark.parametrize("pieces", [[11], [1] * 11, [2, 1, 5, 3], [7, 4]])
@pytest.mark.parametrize("pos", [None, PACKED[:2]], ids=["plain", "packed"])
def test_convolution_in_pieces_is_torch_s(pos, pieces):
    """The past of every piece is the tail of the one before; the plain one is nn.Conv1d's own. The packed one starts documents."""
    x = torch.randn(2, 11, 3, dtype=torch.float64)
    weight, bias = torch.randn(3, K, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    given = torch.arange(11).expand(2, 11) if pos is None else pos
    want = sum(by_hand(x, given, j) * weight[:, K - 1 - j] for j in range(K)) + bias
    tail, length, out, a = torch.zeros(2, K - 1, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.long), [], 0
    for n in pieces:
        at = Positions(2, n, CPU, None if pos is None else pos[:, a:a + n], length, a)
        y, tail = short_conv(x[:, a:a + n], weight, bias, at, tail)
        length, a, out = at.next(length), a + n, out + [y]
    torch.testing.assert_close(torch.cat(out, 1), want)
    conv = torch.nn.Conv1d(3, 3, K, groups=3, padding=K - 1, dtype=torch.float64)
    conv.weight.data, conv.bias.data = weight[:, None], bias
    if pos is None:
        torch.testing.assert_close(conv(x.mT)[..., :11].mT, want)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("B, T", [(1, 700), (3, 171), (300, 2)])
def test_in_blocks_it_is_conv1d_outputs_and_gradients(B, T, with_bias):
    row, weight, bias, g = (torch.randn(s, dtype=torch.float64) for s in ((B, T + K - 1, 3), (3, K), (3,), (B, T, 3)))
    leaves = [t.requires_grad_() for t in (row, weight, bias)[:2 + with_bias]]
    bias = bias if with_bias else None
    ours, theirs = InBlocks.apply(row, weight, bias), F.conv1d(row.mT, weight[:, None], bias, groups=3).mT
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, leaves, g), torch.autograd.grad(theirs, leaves, g))


def test_padding_leaves_no_trace_in_the_tail():
    """Padding on either side, nothing but padding, and an older document: the tail is that of the tokens alone."""
    x, past = torch.randn(5, 11, 3), torch.randn(5, K - 1, 3)
    _, tail = shift(x, K - 1, Positions(5, 11, CPU, PACKED, torch.zeros(5, dtype=torch.long), 5), past)
    ends = [(11, 11), (7, 11), (7, 11), (5, 9)]
    for b, (length, end) in enumerate(ends):
        keep = min(length, K - 1)
        torch.testing.assert_close(tail[b], torch.cat([torch.zeros(K - 1 - keep, 3), x[b, end - keep:end]]), rtol=0, atol=0)
    torch.testing.assert_close(tail[4], past[4], rtol=0, atol=0)
