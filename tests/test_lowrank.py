"""Low-rank segments against a loop over queries in float64, against full attention where nothing is lost, and Linformer proper."""

import importlib.util

import pytest
import torch
from conftest import fed, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from mixers.lowrank import LowRank, LowRankOptions
from model import GPTConfig
from ops.attend import attend
from ops.linformer import linformer
from ops.positions import Positions

CPU, T = torch.device("cpu"), 41
close = dict(rtol=1e-5, atol=1e-5)


def mixer(segment, rank, G=2, **kw) -> LowRank:
    """4 heads of 6; weights that make the scores differ."""
    torch.manual_seed(0)
    m = LowRank(GPTConfig(vocab_size=9, n_embd=20, n_head=4, n_kv_head=G, head_dim=6, **kw), LowRankOptions(segment=segment, rank=rank))
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn_like(p) * (1.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.5))
    return m


def turned(t, theta=10000.0):
    """RoPE of (T, heads, D) by complex numbers."""
    half = t.shape[-1] // 2
    turn = torch.arange(len(t)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
    z = torch.complex(t[..., :half], t[..., half:]) * torch.polar(torch.ones_like(turn), turn)[:, None]
    return torch.cat([z.real, z.imag], -1)


def by_hand(m: LowRank, x: torch.Tensor) -> torch.Tensor:
    """One document x (T, C), one query after another."""
    c, H, G, D = m.segment, m.H, m.G, m.D
    q, k, v = m.qkv(x).view(len(x), -1, D).split([H, G, G], 1)
    if m.cfg.qk_norm:
        q, k = (t / (t.square().mean(-1, keepdim=True) + by.eps).sqrt() * by.weight for t, by in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (turned(t) if m.turn else t for t in (q, k))
    out = []
    for t in range(len(x)):
        heads = []
        for h in range(H):
            g, keys, values = h // (H // G), [], []
            for s in range(t // c):
                for i in range(m.rank):
                    keys.append(sum(m.project_k[g, i, j] * k[s * c + j, g] for j in range(c)))
                    values.append(sum(m.project_v[g, i, j] * v[s * c + j, g] for j in range(c)))
            for j in range(t // c * c, t + 1):
                keys.append(k[j, g]), values.append(v[j, g])
            w = (torch.stack(keys) @ q[t, h] / D**0.5).softmax(0)
            heads.append(w @ torch.stack(values))
        out.append(torch.cat(heads))
    return m.out(torch.stack(out))


def rows_of(lengths):
    return torch.cat([torch.arange(n) if n > 0 else torch.full((-n,), -1) for n in lengths])


PACKED = torch.stack([rows_of(r) for r in ([41], [16, 1, 24], [-9, 32], [-2, 7, 25, -7])])
PLAIN = torch.arange(T).expand(2, T)


def documents(pos):
    """(row, slice) of each."""
    found = []
    for row, p in enumerate(pos.tolist()):
        starts = [i for i, n in enumerate(p) if n == 0]
        found += [(row, slice(i, next((j for j in range(i + 1, len(p)) if p[j] <= 0), len(p)))) for i in starts]
    return found


def assert_same(m, hand, pos, dtype, close, **given):
    """Outputs and every gradient, of whole rows against each document by hand."""
    g = torch.Generator().manual_seed(1)
    shown = PLAIN if pos is None else pos
    x, loud = (torch.randn(*shown.shape, 20, generator=g, dtype=torch.float64) for _ in range(2))
    m.double()
    a, places = x.clone().requires_grad_(), documents(shown)
    want = [hand(m, a[at], at) for at in places]
    sum((y * loud[at]).sum() for y, at in zip(want, places)).backward()
    grads = {name: p.grad.clone() for name, p in m.named_parameters()}
    assert all(grad.abs().max() > 1e-3 for name, grad in grads.items() if "k_norm.bias" not in name)
    m.zero_grad(), m.to(dtype)
    b = x.to(dtype).requires_grad_()
    y = m(b, Positions(len(shown), T, CPU, pos, **given))
    for w, at in zip(want, places):
        torch.testing.assert_close(y[at], w.to(dtype), **close)
    sum((y[at] * loud[at].to(dtype)).sum() for at in places).backward()
    torch.testing.assert_close(b.grad, a.grad.to(dtype), rtol=close["rtol"], atol=close["atol"] * 10)
    for name, p in m.named_parameters():
        scale = grads[name].abs().max().item() + 1
        torch.testing.assert_close(p.grad, grads[name].to(dtype), rtol=close["rtol"], atol=close["atol"] * scale, msg=lambda s, name=name: f"{name}: {s}")


hand = lambda m, x, at: by_hand(m, x)


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("segment, rank", [(4, 2), (7, 3), (5, 5), (1, 1), (30, 4)])
def test_equals_the_loop_in_float64(segment, rank, pos):
    assert_same(mixer(segment, rank, position="none"), hand, pos, torch.float64, dict(rtol=1e-9, atol=1e-9))


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_equals_the_loop_in_float32_with_rotation_norms_and_biases(G, pos):
    assert_same(mixer(6, 4, G, qk_norm=True, bias=True), hand, pos, torch.float32, close)


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_several_blocks_of_queries_give_the_same(pos, monkeypatch):
    import ops.units
    monkeypatch.setattr(ops.units, "BLOCK", 1)
    assert_same(mixer(6, 2), hand, pos, torch.float32, close)


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("segment", [1, 6])
def test_with_as_many_rows_as_tokens_it_starts_as_full_attention(segment, pos):
    torch.manual_seed(0)
    m = LowRank(GPTConfig(vocab_size=9, n_embd=20, n_head=4, n_kv_head=2, head_dim=6), LowRankOptions(segment=segment, rank=segment))
    shown = PLAIN if pos is None else pos
    x, at = torch.randn(len(shown), T, 20), Positions(len(shown), T, CPU, pos)
    with torch.no_grad():
        q, k, v = m.heads(x, at)
        want = m.out(attend(q, k, v, at, backend="reference").transpose(1, 2).flatten(2))
        torch.testing.assert_close(m(x, at)[shown >= 0], want[shown >= 0], **close)


def test_rows_start_as_means_of_neighbours():
    E = LowRank(GPTConfig(vocab_size=9), LowRankOptions(segment=8, rank=2)).project_k
    assert E.shape == (12, 2, 8) and torch.equal(E[3].detach() * 4, torch.tensor([[1.0] * 4 + [0] * 4, [0] * 4 + [1.0] * 4]))


def test_decoding_goes_on_exactly_from_every_length():
    model, x = tiny(layers="lowrank(segment=5, rank=2)", n_kv_head=2), tokens(2, 36)
    whole = model(x)
    for n in range(1, 28):
        torch.testing.assert_close(fed(model, x[:, :n + 8], [n, 1, 2, 5]), whole[:, :n + 8], **close)


def test_rows_go_on_behind_padding_and_into_the_next_document():
    goes_on_behind_padding("lowrank(segment=5, rank=2)")


def goes_on_behind_padding(word):
    import torch.nn.functional as F
    model, x = tiny(layers=word, n_kv_head=2), tokens(3, 50)
    state = model.init_state(3, 50)
    pos = torch.stack([rows_of([19, -4]), rows_of([-4, 19]), rows_of([23])])
    model(torch.stack([F.pad(x[0, :19], (0, 4)), F.pad(x[1, :19], (4, 0)), x[2, :23]]), pos=pos, state=state)
    pos = torch.stack([F.pad(torch.arange(19, 41), (5, 0), value=-1), F.pad(torch.arange(19, 41), (1, 4), value=-1), torch.cat([torch.arange(23, 30), torch.arange(20)])])
    y = model(torch.stack([F.pad(x[0, 19:41], (5, 0)), F.pad(x[1, 19:41], (1, 4)), x[2, 23:50]]), pos=pos, state=state)
    whole = model(x)
    torch.testing.assert_close(y[0, 5:], whole[0, 19:41], **close)
    torch.testing.assert_close(y[1, 1:-4], whole[1, 19:41], **close)
    torch.testing.assert_close(y[2], torch.cat([whole[2, 23:30], model(x[2:, 30:])[0]]), **close)
    alone = model(torch.cat([x[2:, 30:], x[:1, :1]], 1))[0, -1]
    torch.testing.assert_close(model(torch.stack([x[0, 41:42], x[1, 41:42], x[0, :1]]), state=state)[:, 0],
                               torch.stack([whole[0, 41], whole[1, 41], alone]), **close)


def test_a_state_holds_what_is_claimed():
    """260 tokens: 3 rows of each of 32 segments, and the last 7 tokens; one slot more each."""
    state = mixer(8, 3).init_state(5, 260, torch.bfloat16, CPU)
    assert sum(t.nbytes for t in state.values()) == 5 * 2 * 2 * (2 * 6) * (3 * 32 + 7 + 2)


def test_work_and_memory_go_with_what_is_seen():
    """Per token: its block's keys, of which the masked ones add a quarter, and every row."""
    def flops(T):
        m = LowRank(GPTConfig(vocab_size=9, n_embd=64, n_head=4, n_kv_head=1), LowRankOptions(segment=32, rank=4))
        x = torch.randn(1, T, 64)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            m(x, Positions(1, T, CPU))
        return counter.get_total_flops() - 2 * T * sum(p.numel() for p in (m.qkv.weight, m.out.weight))
    assert flops(4096) < 1.5 * 4096 * 4 * 64 * (32 + 4 * 4096 / 32)


@pytest.mark.parametrize("options, message", [(dict(rank=200), "rank=200 must be at most 128"), (dict(segment=0, rank=1), "segment=0 must be at least 1"), (dict(rank=0), "rank=0")])
def test_a_wrong_option_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        LowRankOptions(**options)
    with pytest.raises(ValueError, match="no ALiBi"):
        mixer(4, 2, position="alibi")


# Linformer proper

@pytest.mark.parametrize("heads", [(), (2,)])
def test_linformer_is_its_formula(heads):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, generator=g) for h, n in ((4, 9), (2, 20), (2, 20)))
    E, F = (torch.randn(*heads, 5, 20, generator=g) for _ in "kv")
    got = linformer(q, k, v, E, F)
    for b in range(2):
        for h in range(4):
            e, f = (t[h // 2] if heads else t for t in (E, F))
            want = (q[b, h] @ (e @ k[b, h // 2]).T / 8**0.5).softmax(-1) @ (f @ v[b, h // 2])
            torch.testing.assert_close(got[b, h], want, **close)


def test_linformer_with_the_identity_is_attention_to_all_and_refuses_to_be_causal():
    q, k, v = torch.randn(3, 1, 2, 7, 4).unbind()
    torch.testing.assert_close(linformer(q, k, v, torch.eye(7), torch.eye(7)), attend(q, k, v, Positions(1, 7, CPU), causal=False), **close)
    with pytest.raises(ValueError, match="cannot be causal: each of its rows mixes all positions"):
        linformer(q, k, v, torch.eye(7), torch.eye(7), causal=True)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("linformer") is None, reason="pip install --no-deps linformer==0.2.3")
def test_linformer_equals_the_package():
    from linformer import LinformerSelfAttention
    torch.manual_seed(0)
    theirs, x = LinformerSelfAttention(16, 20, k=5, heads=4), torch.randn(2, 20, 16)
    q, k, v = (f(x).view(2, 20, 4, 4).transpose(1, 2) for f in (theirs.to_q, theirs.to_k, theirs.to_v))
    got = theirs.to_out(linformer(q, k, v, theirs.proj_k.T, theirs.proj_v.T).transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, theirs(x), **close)
