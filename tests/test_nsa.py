"""Native Sparse Attention against a loop over queries in float64, against the naive form of flash-linear-attention, and against full
attention where it attends to everything."""

import importlib.util
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from mixers.nsa import NSA, NSAOptions
from model import GPTConfig
from ops import nsa as module
from ops.attend import attend
from ops.nsa import Sizes, compressed, selected
from ops.positions import Positions
from ops.rope import angles, inverse_frequencies, rotate

CPU = torch.device("cpu")
SIZES = {
    "powers of two": dict(compress=4, stride=2, select=4, blocks=4, window=5),
    "nothing divides": dict(compress=5, stride=3, select=7, blocks=3, window=6),
    "rows longer than blocks": dict(compress=7, stride=2, select=3, blocks=5, window=1),
    "disjoint": dict(compress=4, stride=4, select=4, blocks=5, window=9),
    "one token a row": dict(compress=1, stride=1, select=2, blocks=6, window=3),
    "all of it": dict(compress=3, stride=1, select=10, blocks=8, window=99),
}


def mixer(G=2, **kw) -> NSA:
    """4 heads of 6; weights that make the scores differ."""
    options = {name: kw.pop(name) for name in list(kw) if name in SIZES["disjoint"]}
    torch.manual_seed(0)
    m = NSA(GPTConfig(vocab_size=9, n_embd=20, n_head=4, n_kv_head=G, head_dim=6, **kw), NSAOptions(**options))
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn_like(p) * (1.5 * p.shape[-1] ** -0.5 if p.dim() == 2 else 0.5))
    return m


def turned(t, theta=10000.0):
    """RoPE of (T, heads, D) by complex numbers."""
    half = t.shape[-1] // 2
    turn = torch.arange(len(t)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    z = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(turn), turn)[:, None]
    return torch.cat([z.real, z.imag], -1)


def attention(q, keys, values):
    w = (torch.stack(keys) @ q / len(q) ** 0.5).softmax(0)
    return w @ torch.stack(values), w.detach().tolist()


def by_hand(m: NSA, x: torch.Tensor) -> torch.Tensor:
    """One document x (T, C), one query after another."""
    (l, s, b, n), T, H, G, D = m.sizes, len(x), m.H, m.G, m.D
    q, kw, vw = m.qkv(x).view(T, -1, D).split([H, G, G], 1)
    kc, vc, ks, vs = m.kv(x).view(T, 4, G, D).unbind(1)
    norm = (lambda t, by: t / (t.square().mean(-1, keepdim=True) + by.eps).sqrt() * by.weight) if m.cfg.qk_norm else lambda t, by: t
    q, kw, ks = norm(q, m.cfg.qk_norm and m.q_norm), norm(kw, m.cfg.qk_norm and m.k_norm), norm(ks, m.cfg.qk_norm and m.block_norm)
    gate = m.gate(x).sigmoid().view(T, 3, H)

    def row(make, t, g, i):
        t = t[i * s:i * s + l, g]
        return t.mean(0) + make.down(F.gelu(make.up((t + make.place[g]).flatten())))

    K = [[norm(row(m.compress_k, kc, g, i), m.cfg.qk_norm and m.row_norm) for i in range((T - l) // s + 1)] for g in range(G)]
    V = [[row(m.compress_v, vc, g, i) for i in range((T - l) // s + 1)] for g in range(G)]
    qr, kw, ks = (turned(t) if m.turn else t for t in (q, kw, ks))
    out = []
    for t in range(T):
        heads = []
        for g in range(G):
            seen = [i for i in range(len(K[g])) if i * s + l <= t + 1]
            importance = [0.0] * (t // b + 1)
            group = range(g * (H // G), (g + 1) * (H // G))
            rows = {h: torch.zeros(D).double() for h in group}
            for h in group:
                if seen:
                    rows[h], w = attention(q[t, h], K[g][:len(seen)], V[g][:len(seen)])
                    for i in seen:
                        for u in range(i * s, i * s + l):
                            importance[u // b] += w[i] / s
            forced = {0, t // b, max(0, t // b - 1)}
            ranked = sorted((j in forced, *twelve_bits(importance[j]), j) for j in range(t // b + 1))
            blocks = [j for *_, j in ranked[-n:]]
            among = [u for u in range(t + 1) if u // b in blocks]
            last = range(max(0, t + 1 - m.window), t + 1)
            for h in group:
                chosen, _ = attention(qr[t, h], [ks[u, g] for u in among], [vs[u, g] for u in among])
                window, _ = attention(qr[t, h], [kw[u, g] for u in last], [vw[u, g] for u in last])
                heads.append(gate[t, 0, h] * rows[h] + gate[t, 1, h] * chosen + gate[t, 2, h] * window)
        out.append(torch.cat(heads))
    return m.out(torch.stack(out))


def twelve_bits(x: float) -> tuple[int, int]:
    mantissa, exponent = math.frexp(x)
    return (exponent, int(mantissa * 4096)) if x else (-9999, 0)


def rows_of(lengths):
    return torch.cat([torch.arange(n) if n > 0 else torch.full((-n,), -1) for n in lengths])


PACKED = torch.stack([rows_of(r) for r in ([41], [16, 1, 24], [-9, 32], [-2, 7, 25, -7])])


def assert_same(m: NSA, pos: torch.Tensor | None, close: dict, dtype: torch.dtype) -> None:
    """Outputs and every gradient, of whole rows against each document by hand."""
    x = torch.randn(4, 41, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loud = torch.randn(4, 41, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    pos_ = PACKED if pos is None else pos
    m.double()
    a = x.clone().requires_grad_()
    want, places = [], []
    for row in range(4 if pos is not None else 2):
        for start in ((pos_[row] == 0).nonzero()[:, 0].tolist() if pos is not None else [0]):
            stop = next((i for i in range(start + 1, 41) if pos is not None and pos_[row, i] <= 0), 41)
            want.append(by_hand(m, a[row, start:stop]))
            places.append((row, slice(start, stop)))
    sum((y * loud[at]).sum() for y, at in zip(want, places)).backward()
    grads = {name: p.grad.clone() for name, p in m.named_parameters()}
    m.zero_grad()
    m.to(dtype)
    c = x.to(dtype).requires_grad_()
    n = 4 if pos is not None else 2
    y = m(c[:n], Positions(n, 41, CPU, pos))
    for w, at in zip(want, places):
        torch.testing.assert_close(y[at], w.to(dtype), **close)
    sum((y[at] * loud[at].to(dtype)).sum() for at in places).backward()
    torch.testing.assert_close(c.grad, a.grad.to(dtype), rtol=close["rtol"], atol=close["atol"] * 10)
    for name, p in m.named_parameters():
        scale = grads[name].abs().max().item() + 1
        torch.testing.assert_close(p.grad, grads[name].to(dtype), rtol=close["rtol"], atol=close["atol"] * scale, msg=lambda s, name=name: f"{name}: {s}")


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_the_loop_in_float64(sizes, pos):
    assert_same(mixer(**SIZES[sizes], position="none"), pos, dict(rtol=1e-9, atol=1e-9), torch.float64)


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("sizes", ["powers of two", "nothing divides"])
def test_equals_the_loop_in_float32_with_rotation_norms_and_biases(sizes, G):
    assert_same(mixer(G, **SIZES[sizes], qk_norm=True, bias=True), PACKED, dict(rtol=1e-5, atol=1e-5), torch.float32)


@pytest.mark.parametrize("sizes", ["powers of two", "nothing divides"])
def test_small_tiles_and_chunks_give_the_same(sizes, monkeypatch):
    for name, size in (("TILE", 3), ("PAIRS", 30), ("SCORES", 200)):
        monkeypatch.setattr(module, name, size)
    assert_same(mixer(**SIZES[sizes], position="none"), PACKED, dict(rtol=1e-9, atol=1e-9), torch.float64)


# flash-linear-attention

@pytest.fixture(scope="module")
def naive():
    """fla/ops/nsa/naive.py alone: the package itself wants Triton."""
    spec = importlib.util.find_spec("fla")
    pytest.importorskip("einops")
    if spec is None:
        pytest.skip("pip install --no-deps fla-core")
    path = f"{spec.submodule_search_locations[0]}/ops/nsa/naive.py"
    pooling = types.ModuleType("fla.ops.utils.pooling")
    pooling.mean_pooling = lambda t, size, _: F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % size)).unflatten(1, (-1, size)).mean(2)    # nothing sees an unfinished one
    utils = types.ModuleType("fla.ops.utils")
    utils.prepare_chunk_offsets = None
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in (("fla", types.ModuleType("fla")), ("fla.ops", types.ModuleType("fla.ops")), ("fla.ops.utils", utils), ("fla.ops.utils.pooling", pooling)):
            patch.setitem(sys.modules, name, stub)
        spec = importlib.util.spec_from_file_location("fla_nsa_naive", path)
        out = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(out)
        yield out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.parametrize("T", [64, 75])
def test_equals_flash_linear_attentions_naive_form(naive, T):
    """Rows and blocks the same, means as rows: outputs and gradients of both branches, and the blocks."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, T, 8, generator=g).requires_grad_() for h in (32, 2, 2))
    gate = torch.rand(2, 2, T, 32, generator=g)
    loud, pos = torch.randn(2, 32, T, 8, generator=g), torch.arange(T).expand(2, T)
    grads = []
    for ours in (True, False):
        if ours:
            k_, v_ = (t[:, :, :T // 8 * 8].unflatten(2, (-1, 8)).mean(3) for t in (k, v))
            y, found = compressed(q, k_, v_, pos, None, Sizes(8, 8, 8, 4), 0)
            y = y * gate[0].mT[..., None] + selected(q, k, v, found, pos, torch.zeros_like(pos), 8) * gate[1].mT[..., None]
        else:
            y, theirs = naive.naive_nsa(*(t.transpose(1, 2) for t in (q, k, v)), g_cmp=gate[0], g_slc=gate[1], block_counts=4, block_size=8, return_block_indices=True)
            y = y.transpose(1, 2)
        grads.append((y, *torch.autograd.grad((y * loud).sum(), (q, k, v))))
    assert torch.equal(found.sort(-1).values, theirs.transpose(1, 2).sort(-1).values)
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


# what is known without an oracle

def forced(m: NSA, branch: int) -> NSA:
    """One gate open, the others shut, whatever the input."""
    with torch.no_grad():
        m.gate.weight.zero_()
        m.gate.bias.copy_(torch.full((3, m.H), -1e9).index_fill_(0, torch.tensor(branch), 1e9).flatten())
    return m


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_branch_that_leaves_nothing_out_is_full_attention(branch):
    m = forced(mixer(compress=1, stride=1, select=9, blocks=5, window=41, bias=True), branch)
    x = torch.randn(4, 41, 20)
    at = Positions(4, 41, CPU, PACKED)
    with torch.no_grad():
        m.compress_k.down.weight.zero_(), m.compress_v.down.weight.zero_(), m.compress_k.down.bias.zero_(), m.compress_v.down.bias.zero_()
        kv = m.kv(x).view(4, 41, 4, 2, 6).transpose(1, 3)                        # (B, G, 4, T, D)
        q, k, v = m.qkv(x).view(4, 41, -1, 6).transpose(1, 2).split([4, 2, 2], 1)
        k, v = ((kv[:, :, 0], kv[:, :, 1]), (kv[:, :, 2], kv[:, :, 3]), (k, v))[branch]
        if branch:
            table = angles(PACKED, inverse_frequencies(6))
            q, k = rotate(q, *table), rotate(k, *table)
        want = m.out(attend(q, k, v, at, backend="reference").transpose(1, 2).flatten(2))
        real = PACKED >= 0
        torch.testing.assert_close(m(x, at)[real], want[real], rtol=1e-5, atol=1e-5)


def test_of_equal_importances_the_later_block_wins_whole_and_token_by_token():
    """The same token over and over: every row alike, but for rounding."""
    sizes, T = Sizes(4, 2, 4, 5), 60
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 1, 8, generator=g).expand(1, 4, T, 8), torch.randn(1, 2, 1, 8, generator=g).expand(1, 2, 29, 8)
    pos = torch.arange(T)[None]
    _, blocks = compressed(q, k, k, pos, None, sizes, 0)
    for t in range(T):
        one = compressed(q[:, :, :1], k[:, :, :max(1, sizes.rows(t + 1))], k[:, :, :max(1, sizes.rows(t + 1))], pos[:, t:t + 1], None, sizes, t)[1]
        assert sorted(one[0, 0, 0].tolist()) == sorted(blocks[0, 0, t].tolist())
    assert sorted(blocks[0, 0, -1].tolist()) == [0, 11, 12, 13, 14]


def test_the_heads_of_a_group_choose_together_and_always_the_first_and_the_last_two():
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 6, 80, 8, generator=g), torch.randn(2, 2, 40, 8, generator=g)
    pos = torch.arange(80).expand(2, 80)
    _, blocks = compressed(q, k, k, pos, None, Sizes(4, 2, 5, 4), 0)
    assert blocks.shape == (2, 2, 80, 4)
    own = pos[:, None, :, None] // 5
    for need in (torch.zeros_like(own), own, (own - 1).clamp(min=0)):
        assert (blocks == need).any(-1).all()
    assert ((blocks <= own) & ((blocks >= 0).sum(-1, keepdim=True) == (own + 1).clamp(max=4))).all()
    moved = compressed(q.flip(1).unflatten(1, (2, 3)).flip(1).flatten(1, 2), k, k, pos, None, Sizes(4, 2, 5, 4), 0)[1]     # heads change places inside a group
    assert torch.equal(moved, blocks)


# decoding

@pytest.mark.parametrize("sizes", ["powers of two", "nothing divides", "rows longer than blocks", "one token a row"])
def test_decoding_goes_on_exactly_from_every_length(sizes):
    word = "nsa(" + ", ".join(f"{k}={v}" for k, v in SIZES[sizes].items()) + ")"
    model, x = tiny(layers=word, n_kv_head=2), tokens(2, 48)
    whole = model(x)
    for n in range(1, 40):
        torch.testing.assert_close(fed(model, x[:, :n + 8], [n, 1, 2, 5]), whole[:, :n + 8], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", ["powers of two", "nothing divides"])
def test_rows_go_on_behind_padding_and_into_the_next_document(sizes):
    word = "nsa(" + ", ".join(f"{k}={v}" for k, v in SIZES[sizes].items()) + ")"
    model, x = tiny(layers=word, n_kv_head=2), tokens(3, 50)
    state = model.init_state(3, 50)
    pos = torch.stack([rows_of([19, -4]), rows_of([-4, 19]), rows_of([23])])
    model(torch.stack([F.pad(x[0, :19], (0, 4)), F.pad(x[1, :19], (4, 0)), x[2, :23]]), pos=pos, state=state)
    pos = torch.stack([F.pad(torch.arange(19, 41), (5, 0), value=-1), F.pad(torch.arange(19, 41), (1, 4), value=-1), torch.cat([torch.arange(23, 30), torch.arange(20)])])
    y = model(torch.stack([F.pad(x[0, 19:41], (5, 0)), F.pad(x[1, 19:41], (1, 4)), x[2, 23:50]]), pos=pos, state=state)
    whole = model(x)
    torch.testing.assert_close(y[0, 5:], whole[0, 19:41], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y[1, 1:-4], whole[1, 19:41], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(y[2], torch.cat([whole[2, 23:30], model(x[2:, 30:])[0]]), rtol=1e-5, atol=1e-5)
    alone = model(torch.cat([x[2:, 30:], x[:1, :1]], 1))[0, -1]
    torch.testing.assert_close(model(torch.stack([x[0, 41:42], x[1, 41:42], x[0, :1]]), state=state)[:, 0],
                               torch.stack([whole[0, 41], whole[1, 41], alone]), rtol=1e-5, atol=1e-5)


def test_a_state_holds_what_is_claimed():
    """256 tokens: keys and values of all, of (256 - 8) / 4 + 1 rows, of a window of 20, and the inputs of 7; one slot more each."""
    m = mixer(compress=8, stride=4, select=8, blocks=4, window=20)
    state = m.init_state(3, 256, torch.bfloat16, CPU)
    assert sum(t.nbytes for t in state.values()) == 3 * 2 * 2 * (2 * 6) * (257 + 64 + 21 + 8)


# cost

def test_the_work_goes_with_what_is_attended():
    def flops(T):
        q, k = torch.randn(1, 8, T, 16, requires_grad=True), torch.randn(1, 2, T, 16, requires_grad=True)
        pos, sizes = torch.arange(T)[None], Sizes(16, 8, 16, 4)
        _, blocks = compressed(q, k[:, :, :T // 8], k[:, :, :T // 8], pos, None, sizes, 0)
        with FlopCounterMode(display=False) as counter:
            selected(q, k, k, blocks, pos, torch.zeros_like(pos), 16).sum().backward()
        return counter.get_total_flops()
    needed = lambda T: T * 8 * 16 * 4 * 16 * 2 * 7                               # queries, heads, channels, keys; seven products
    assert flops(1024) < 2.5 * needed(1024) and flops(4096) < 1.5 * needed(4096)


def test_compiled_is_eager():
    """The two operations of ops/nsa.py run as they are, between what is compiled."""
    model, x = tiny(layers="nsa(compress=4, stride=2, select=4, blocks=3, window=5)", n_kv_head=2), tokens(2, 30)
    for pos in (None, torch.cat([torch.arange(11), torch.arange(19)]).expand(2, 30)):
        torch.testing.assert_close(torch.compile(model, backend="eager")(x, pos=pos), model(x, pos=pos), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options, message", [
    (dict(stride=40), "make it at most compress=32"), (dict(blocks=2), "blocks=2 must be at least 3"), (dict(window=0), "window=0 must be at least 1"),
])
def test_a_wrong_option_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        NSAOptions(**options)
    with pytest.raises(ValueError, match="no ALiBi"):
        mixer(position="alibi")
