"""Speculative decoding changes when text comes, never what: token for token where it is greedy, in distribution where it is drawn."""

from collections import Counter
from itertools import product

import pytest
import torch
from conftest import tiny, tokens

from engine.generate import Batch, Options
from engine.speculate import Draft, Lookup, Reader
from mixers import MIXERS

PROMPTS = [tokens(1, n, seed=n)[0].tolist() for n in (3, 17, 40, 1, 9)]


def written(model, prompts, speculate=None, width=3, seeds=None, overflow=None, vocab_size=None, **options) -> list[list[int]]:
    batch = Batch(model, width, vocab_size, overflow, speculate)
    for row, p in enumerate(prompts):
        batch.add(row, p, Options(**{**dict(temperature=0, max_new_tokens=30 + 5 * row), **options}), (seeds or range(99))[row])
    out, ended = [[] for _ in prompts], set()
    while drawn := batch.step():
        for d in drawn:
            assert d.key not in ended
            out[d.key].append(d.id)
            ended |= {d.key} if d.last else set()
    written.ratio = batch.drawn / batch.steps
    return out


def near(model, noise: float, seed: int = 1):
    """A draft that often guesses right: the model's copy, its weights a little off."""
    draft = tiny(**{**model.cfg.model_fields(), "kv_cache": "full"})
    draft.load_state_dict(model.state_dict())
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(noise * p.std().nan_to_num() * torch.randn_like(p))
    return draft


@pytest.mark.parametrize("word", [*MIXERS, "attention(window=7, sinks=3)", "gated_deltanet attention", "mamba2|attention", "mla(window=7, sinks=3)"])
def test_greedy_text_is_the_same(word):
    """For every mixer, rows joining and leaving, with drafts good and bad, and by look-up."""
    model = tiny(layers=word, tie_embeddings=False, block_size=64)
    want = written(model, PROMPTS)
    for draft in (near(model, 0.02), tiny(5, layers="attention", tie_embeddings=False, block_size=64, n_embd=16)):
        assert written(model, PROMPTS, Draft(draft, 3)) == want
    assert written(model, PROMPTS, Draft(near(model, 0), 3)) == want and written.ratio > 2
    assert written(model, PROMPTS, Lookup(4)) == want


@pytest.mark.parametrize("cfg", [dict(kv_cache="streaming(sinks=2, window=11)"), dict(mlp="rwkv7"), dict(position="learned"), dict(layers="attention mamba2")], ids=str)
@pytest.mark.parametrize("overflow", ["half", "slide", "refuse"])
def test_text_beyond_the_context_is_the_same(cfg, overflow):
    model = tiny(block_size=32, tie_embeddings=False, **cfg)
    if overflow == "slide" and "streaming" not in str(cfg):
        return
    prompts = [p[:32] for p in PROMPTS]
    want = written(model, prompts, overflow=overflow, max_new_tokens=80)
    for speculate in (Draft(near(model, 0.02), 3), Lookup(5)):
        if overflow != "slide" or type(speculate) is Lookup:
            assert written(model, prompts, speculate, overflow=overflow, max_new_tokens=80) == want
        else:
            with pytest.raises(ValueError, match="overflow=slide needs a state"):
                written(model, prompts, speculate, overflow=overflow)


def test_penalties_stops_and_limits_hold_for_guesses():
    model = tiny(tie_embeddings=False)
    for options in (dict(repetition_penalty=1.5, frequency_penalty=0.3), dict(logit_bias=((7, 3.0),), presence_penalty=1.0),
                    dict(stop_ids=(written(model, PROMPTS)[1][6],), min_new_tokens=4), dict(max_new_tokens=1), dict(max_new_tokens=7)):
        want = written(model, PROMPTS, **options)
        for speculate in (Draft(near(model, 0.02), 3), Lookup(4)):
            assert written(model, PROMPTS, speculate, **options) == want
    assert all(i < 10 for text in written(model, PROMPTS, Draft(near(model, 0.1), 3), vocab_size=10, temperature=1.0) for i in text)


@torch.no_grad()
@pytest.mark.parametrize("how", ["near", "far", "lookup"])
def test_drawn_text_has_the_models_distribution(how):
    """All texts of three tokens of a vocabulary of 4, by their probabilities; with top_p and a temperature, which shape both."""
    model = tiny(vocab_size=4, tie_embeddings=False)
    options = dict(temperature=1.7, top_p=0.95, max_new_tokens=3)
    prompt, n = [1, 2, 3, 1, 2], 3000
    exact = {}
    for ids in product(range(4), repeat=3):
        p = 1.0
        for j, i in enumerate(ids):
            batch = Batch(model)
            p *= float(batch.likely(type("R", (), {"options": Options(**options)})(), model(torch.tensor([prompt + list(ids[:j])]))[0, -1], [])[i])
        exact[ids] = p
    assert sum(exact.values()) == pytest.approx(1, abs=1e-5)
    speculate = Lookup(3) if how == "lookup" else Draft(near(model, 0.3) if how == "near" else tiny(9, vocab_size=4, n_embd=16, tie_embeddings=False), 2)
    texts = written(model, [prompt] * n, speculate, width=n, seeds=range(n), **options)
    assert written.ratio > 1.05
    found = Counter(map(tuple, texts))
    assert all(exact[ids] > 0 for ids in found)
    many = [ids for ids in exact if n * exact[ids] >= 5]
    chi2 = sum((found[ids] - n * exact[ids]) ** 2 / (n * exact[ids]) for ids in many)
    assert chi2 < len(many) + 4 * (2 * len(many)) ** 0.5, (chi2, len(many))
    assert written(model, [prompt] * 5, speculate, width=2, seeds=range(5), **options) == texts[:5]      # a row's text is its seed's


@torch.no_grad()
@pytest.mark.parametrize("word", ["attention", "attention(window=5)", "mamba2", "nsa", "lowrank", "hierarchical", "mla", "forgetting", "rwkv7"])
def test_what_was_unread_leaves_no_trace(word):
    model, x = tiny(layers=word), tokens(3, 30)
    reader = Reader(model)
    reader.state = model.init_state(3, 64)
    reader.mark()
    reader.read(x[:, :12].tolist())
    reader.keep([12] * 3)
    reader.mark()
    reader.read([x[0, 12:16].tolist(), [5, 6], []])
    reader.read([[9], [], [1, 2, 3]])
    reader.keep([3, 0, 1])
    own = [[*x[0, :15].tolist()], [*x[1, :12].tolist()], [*x[2, :12].tolist(), 1]]
    got = reader.feed([[3, 4], [3, 4], [3, 4]])
    for i, ids in enumerate(own):
        torch.testing.assert_close(got[i], model(torch.tensor([[*ids, 3, 4]]))[0, -2:], rtol=1e-4, atol=2e-5)


def test_what_cannot_be_speculated_says_so():
    for cache in ("int8", "h2o", "snapkv"):
        with pytest.raises(ValueError, match=f"kv_cache={cache} keeps what depends on how many tokens are read at once"):
            Batch(tiny(kv_cache=cache), speculate=Lookup())


@pytest.mark.parametrize("how", ["draft", "lookup"])
def test_a_session_goes_on_alike(how):
    model = tiny(tie_embeddings=False, block_size=64)

    def told(speculate) -> list[int]:
        batch, out = Batch(model, speculate=speculate), []
        batch.add(0, PROMPTS[1], Options(temperature=0, max_new_tokens=9), 0)
        for more in (PROMPTS[0], [], PROMPTS[4], PROMPTS[1]):             # beyond the context at last
            n = 0
            while n < 9:
                drawn = batch.step()
                n += len(drawn)
                out += [d.id for d in drawn]
            batch.go_on(more)
        return out

    assert told(Draft(near(model, 0.02), 3) if how == "draft" else Lookup(4)) == told(None)
