"""Tokens, sentences, paragraphs against a loop over queries in float64 that reads borders as one reads a text, and against full attention
where nothing is lost."""

import math

import pytest
import torch
from conftest import fed, tiny, tokens
from test_lowrank import CPU, PACKED, PLAIN, T, assert_same, close, goes_on_behind_padding, turned
from torch.utils.flop_counter import FlopCounterMode

import ops.units
from mixers.hierarchical import Hierarchical, HierarchicalOptions
from model import GPTConfig
from ops.attend import attend
from ops.positions import Positions

TEXT = torch.randint(9, (4, T), generator=torch.Generator().manual_seed(3))
SIZES = {
    "powers of two": dict(sentence=4, paragraph=2), "nothing divides": dict(sentence=3, paragraph=5), "a token a sentence": dict(sentence=1, paragraph=4),
    "a sentence a paragraph": dict(sentence=5, paragraph=1), "by ends": dict(sentence=6, paragraph=3, ends=(1, 4), shortest=2),
    "by many ends": dict(sentence=5, paragraph=2, ends=(0, 1, 2, 3, 4, 5), shortest=1), "by rare ends": dict(sentence=9, paragraph=2, ends=(7,), shortest=9),
}


def mixer(G=2, **kw) -> Hierarchical:
    """4 heads of 6; weights that make the scores differ."""
    options = {name: kw.pop(name) for name in list(kw) if name in SIZES["by ends"]}
    torch.manual_seed(0)
    m = Hierarchical(GPTConfig(vocab_size=9, n_embd=20, n_head=4, n_kv_head=G, head_dim=6, **kw), HierarchicalOptions(**options))
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn_like(p) * (1.5 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.5))
        m.pool_tokens.mul_(3), m.pool_sentences.mul_(3)
    return m


def read(m, text) -> list[tuple[list[list[list[int]]], list[list[int]], list[int]]]:
    """For every token: the closed paragraphs, the closed sentences of its own, and its sentence up to itself; sentences are lists of places."""
    paragraphs, sentences, current, seen = [], [], [], []
    for t, token in enumerate(text):
        current = [*current, t]
        seen.append((list(paragraphs), list(sentences), current))
        if len(current) == m.sentence or (token in m.ends and len(current) >= m.shortest):
            sentences, current = [*sentences, current], []
            if len(sentences) == m.paragraph:
                paragraphs, sentences = [*paragraphs, sentences], []
    return seen


def pooled(parts, u):
    """(key, value, tokens) of each part -> those of the whole."""
    K, V, n = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), [p[2] for p in parts]
    w = (K @ u / len(u) ** 0.5 + torch.tensor(n).double().log()).softmax(0)
    return w @ K, w @ V, sum(n)


def by_hand(m, x, text):
    """One document x (T, C), one query after another."""
    H, G, D = m.H, m.G, m.D
    q, k, v = m.qkv(x).view(len(x), -1, D).split([H, G, G], 1)
    if m.cfg.qk_norm:
        q, k = (t / (t.square().mean(-1, keepdim=True) + by.eps).sqrt() * by.weight for t, by in ((q, m.q_norm), (k, m.k_norm)))
    q, k = (turned(t) if m.turn else t for t in (q, k))
    out, made = [], {}

    def row(unit, g):
        name = (str(unit), g)
        if name not in made:
            if isinstance(unit, int):
                made[name] = (k[unit, g], v[unit, g], 1)
            else:
                made[name] = pooled([row(part, g) for part in unit], (m.pool_tokens if isinstance(unit[0], int) else m.pool_sentences)[g])
        return made[name]

    for t, (paragraphs, sentences, current) in enumerate(read(m, text)):
        heads = []
        for h in range(H):
            rows = [row(unit, h // (H // G)) for unit in [*paragraphs, *sentences, *current]]
            w = torch.stack([key @ q[t, h] / D**0.5 + math.log(n) for key, _, n in rows]).softmax(0)
            heads.append(w @ torch.stack([value for _, value, _ in rows]))
        out.append(torch.cat(heads))
    return m.out(torch.stack(out))


def hand(m, x, at):
    return by_hand(m, x, TEXT[at].tolist())


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("sizes", [name for name in SIZES if not name.startswith("a ")])
def test_equals_the_loop_in_float64(sizes, pos):
    text = TEXT if pos is not None else TEXT[:2]
    assert_same(mixer(**SIZES[sizes], position="none"), hand, pos, torch.float64, dict(rtol=1e-9, atol=1e-9), tokens=text)


@pytest.mark.parametrize("G", [1, 4])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("sizes", ["nothing divides", "by ends"])
def test_equals_the_loop_in_float32_with_rotation_norms_and_biases(sizes, pos, G):
    assert_same(mixer(G, **SIZES[sizes], qk_norm=True, bias=True), hand, pos, torch.float32, close, tokens=TEXT if pos is not None else TEXT[:2])


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("sizes", ["nothing divides", "by many ends"])
def test_several_blocks_of_queries_give_the_same(sizes, pos, monkeypatch):
    monkeypatch.setattr(ops.units, "BLOCK", 1)
    assert_same(mixer(**SIZES[sizes]), hand, pos, torch.float32, close, tokens=TEXT if pos is not None else TEXT[:2])


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("sizes", ["a token a sentence", "alike", "alike by ends"])
def test_where_nothing_is_lost_it_is_full_attention(sizes, pos):
    """A unit is a token; or the keys of a paragraph are alike, but not the values: ln |U| makes up for |U| - 1 keys."""
    one = dict(sentence=1, paragraph=1)
    m = mixer(**{"a token a sentence": one, "alike": dict(sentence=4, paragraph=2), "alike by ends": SIZES["by ends"]}[sizes], position="none")
    shown, text = (PLAIN, TEXT[:2]) if pos is None else (pos, TEXT)
    x, at = torch.randn(len(shown), T, 20), Positions(len(shown), T, CPU, pos, tokens=text)
    with torch.no_grad():
        q, k, v = m.heads(x, at)
        if sizes != "a token a sentence":
            for row in range(len(shown)):
                for start in [i for i in range(T) if shown[row, i] == 0]:
                    for t, (paragraphs, _, _) in enumerate(read(m, text[row, start:].tolist())):     # the key of a token is that of its paragraph's number
                        k[row, :, start + t] = torch.randn(2, 6, generator=torch.Generator().manual_seed(len(paragraphs)))
            m.heads = lambda x, at: (q, k, v)
        want = m.out(attend(q, k, v, at, backend="reference").transpose(1, 2).flatten(2))
        torch.testing.assert_close(m(x, at)[shown >= 0], want[shown >= 0], **close)


def test_sentences_close_at_their_ends():
    assert HierarchicalOptions(ends=1).ends == (1,)
    m = mixer(sentence=5, paragraph=2, ends=(1,), shortest=2)
    text = torch.tensor([[1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0]])          # 1 1 | 0 0 0 0 0 | 1 0 1 | 0 0: the last stays open
    s, p = m.closing(Positions(1, 12, CPU, tokens=text), None)
    assert s.closes[0].nonzero()[:, 0].tolist() == [1, 6, 9] and p.closes[0].nonzero()[:, 0].tolist() == [6]
    assert s.since[0].tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1] and s.number[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3]
    assert s.end[0, s.made[0]].tolist() == [1, 6, 9] and s.made.shape == (1, 6)


@pytest.mark.parametrize("word", ["hierarchical(sentence=3, paragraph=2)", "hierarchical(sentence=5, paragraph=3, ends=(1, 5, 9, 13, 17, 21, 33), shortest=1)"])
def test_decoding_goes_on_exactly_from_every_length(word):
    model, x = tiny(layers=word, n_kv_head=2), tokens(2, 36)
    whole = model(x)
    for n in range(1, 28):
        torch.testing.assert_close(fed(model, x[:, :n + 8], [n, 1, 2, 5]), whole[:, :n + 8], **close)


@pytest.mark.parametrize("word", ["hierarchical(sentence=3, paragraph=2)", "hierarchical(sentence=7, paragraph=2, ends=(1, 5, 9, 13, 17, 21, 33), shortest=2)"])
def test_rows_go_on_behind_padding_and_into_the_next_document(word):
    goes_on_behind_padding(word)


def test_a_state_holds_what_is_claimed():
    """260 tokens: 10 paragraphs of 24, the last 3 sentences, the last 5 tokens; one slot more each; with ends, up to 32 paragraphs of at
    least 8, the sizes of rows in float32, and two counters."""
    size = lambda **kw: sum(t.nbytes for t in mixer(sentence=6, paragraph=4, **kw).init_state(5, 260, torch.bfloat16, CPU).values())
    assert size() == 5 * 2 * 2 * (2 * 6) * (10 + 3 + 5 + 3)
    assert size(ends=(3,), shortest=2) == 5 * (2 * 2 * (2 * 6) * (32 + 3 + 5 + 3) + 4 * (32 + 3 + 2) + 16)


def test_the_work_goes_with_what_is_seen():
    """Own tokens of a block of 128, its sentences, every paragraph: 168 keys a query at 4,096 tokens."""
    def flops(T):
        m = Hierarchical(GPTConfig(vocab_size=9, n_embd=64, n_head=4, n_kv_head=1), HierarchicalOptions())
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            m(torch.randn(1, T, 64), Positions(1, T, CPU))
        return counter.get_total_flops() - 2 * T * sum(p.numel() for p in (m.qkv.weight, m.out.weight))
    assert flops(4096) < 1.1 * 4096 * 4 * 64 * (128 + 8 + 32)


@pytest.mark.parametrize("options, message", [(dict(sentence=0), "sentence=0 must be at least 1"), (dict(ends=(3,), shortest=17), "shortest=17 must be at most 16"),
                                              (dict(ends=("x",)), "ends='x' is no int"), (dict(paragraph=0), "paragraph=0")])
def test_a_wrong_option_is_one_line(options, message):
    with pytest.raises(ValueError, match=message):
        HierarchicalOptions(**options)
    with pytest.raises(ValueError, match="no ALiBi"):
        mixer(position="alibi")
    with pytest.raises(ValueError, match="needs the tokens"):
        mixer(ends=(3,))(torch.randn(1, 5, 20), Positions(1, 5, CPU))
