"""The contract, for every word of MIXERS: pieces, documents, padding, causality, gradients, copied states."""

import copy

import pytest
import torch
from conftest import VARIANTS, fed, tiny, tokens, words

from mixers import MIXERS, parse

PIECES = [[50], [10] * 5, [1] * 50, [7, 43], [3, 1, 1, 20, 2, 23]]
close = dict(rtol=1e-5, atol=1e-5)


def positions(*rows: list[int], T: int = 50) -> torch.Tensor:
    """Rows of document lengths; a negative one is padding."""
    out = [[p for n in row for p in (range(n) if n > 0 else [-1] * -n)] for row in rows]
    assert all(len(r) == T for r in out)
    return torch.tensor(out)


PACKED = positions([50], [20, 1, 29], [-17, 33], [-5, 10, 25, -10])


@pytest.mark.parametrize("G", [4, 1])
@pytest.mark.parametrize("word", words())
def test_pieces_give_the_numbers_of_the_whole(word, G):
    """C1, C2: a prompt fed whole, in pieces of 10, one by one, 7 + 43 and unevenly."""
    model, x = tiny(layers=word, n_kv_head=G), tokens(3, 50)
    whole = model(x)
    for pieces in PIECES:
        torch.testing.assert_close(fed(model, x, pieces), whole, **close)


@pytest.mark.parametrize("word", words())
def test_documents_and_padding_give_each_row_what_it_gives_alone(word):
    """C10: packed and left- or right-padded rows, without a state and with one, in pieces."""
    model, x = tiny(layers=word), tokens(4, 50)
    got = model(x, pos=PACKED)
    for row in range(4):
        starts = [i for i in range(50) if PACKED[row, i] == 0]
        for start in starts:
            end = next((i for i in range(start + 1, 50) if PACKED[row, i] <= 0), 50)
            torch.testing.assert_close(got[row, start:end], model(x[row:row + 1, start:end])[0], **close)
    real = PACKED >= 0
    for pieces in PIECES:
        torch.testing.assert_close(fed(model, x, pieces, pos=PACKED)[real], got[real], **close)


@pytest.mark.parametrize("word", words())
def test_rows_of_different_length_go_on_as_alone(word):
    """C10: left-padded prompts, then tokens without positions; rows permuted and dropped on the way."""
    model, lengths = tiny(layers=word), [3, 17, 40]
    prompts, more = [tokens(1, n, seed=n)[0] for n in lengths], tokens(3, 20, seed=9)
    alone = [model(torch.cat([p, m])[None])[0, len(p) - 1:] for p, m in zip(prompts, more)]
    x = torch.stack([torch.cat([torch.zeros(40 - len(p), dtype=torch.long), p]) for p in prompts])
    pos = torch.stack([torch.cat([torch.full((40 - n,), -1), torch.arange(n)]) for n in lengths])
    state = model.init_state(3, 64)
    got = [model(x, pos=pos, state=state)[:, -1:]]
    order, state = torch.tensor([2, 0, 1]), state.rows(torch.tensor([2, 0, 1]))
    back = torch.argsort(order)
    for i in range(10):
        got.append(model(more[order, i:i + 1], state=state)[back])
    state = state.rows(torch.tensor([0, 2]))                   # the row of 3 tokens leaves
    for i in range(10, 20):
        y = model(more[[2, 1], i:i + 1], state=state)
        got.append(torch.stack([alone[0][i + 1:i + 2], y[1], y[0]]))
    torch.testing.assert_close(torch.cat(got, 1), torch.stack(alone), rtol=1e-5, atol=2e-5)
    assert state.length.tolist() == [60, 37]


@pytest.mark.parametrize("word", words())
def test_padding_leaves_every_state_as_it_was(word):
    model, x = tiny(layers=word), tokens(2, 12)
    state = model.init_state(2, 32)
    model(x, state=state)
    after = model(tokens(2, 4, 1), state=copy.deepcopy(state))
    model(tokens(2, 5, 2), pos=torch.full((2, 5), -1), state=state)
    assert state.length.tolist() == [12, 12]
    torch.testing.assert_close(model(tokens(2, 4, 1), state=state), after, **close)


@pytest.mark.parametrize("word", words())
def test_nothing_leaks_from_later_tokens_other_documents_or_padding(word):
    """By autograd: the gradient of one output with respect to the embeddings of what it must not see is exactly zero."""
    model, x = tiny(layers=word), tokens(4, 50)
    embedded = []
    model.wte.register_forward_hook(lambda m, i, out: embedded.append(out.retain_grad() or out))
    for row, t in [(0, 30), (1, 19), (1, 20), (1, 40), (2, 40), (3, 14), (3, 38)]:
        embedded.clear()
        model(x, pos=PACKED)[row, t].square().sum().backward()
        reached = embedded[0].grad[row].abs().sum(-1) > 0
        start = t - int(PACKED[row, t])
        assert not reached[:start].any() and not reached[t + 1:].any() and reached[t]
        assert embedded[0].grad[[r for r in range(4) if r != row]].abs().sum() == 0


@pytest.mark.parametrize("word", words())
def test_changing_a_token_changes_nothing_before_it(word):
    model, x = tiny(layers=word), tokens(3, 50)
    y = x.clone()
    y[:, 30] = (y[:, 30] + 1) % 65
    a, b = model(x), model(y)
    assert torch.equal(a[:, :30], b[:, :30]) and (a[:, 30] != b[:, 30]).any()
    a, b = fed(model, x, [7, 43]), fed(model, y, [7, 43])
    assert torch.equal(a[:, :30], b[:, :30])


@pytest.mark.parametrize("word", words())
def test_gradients_reach_every_parameter_in_training(word):
    model = tiny(layers=word, qk_norm=True, bias=True, norm="layernorm").train()
    x = tokens(2, 150)                                         # past the longest unit of which a default word makes one row
    model(x, x.roll(-1, 1)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in model.named_parameters() if "norm.bias" not in n)


@pytest.mark.parametrize("word", words())
def test_a_copied_state_goes_on_like_the_original_and_apart_from_it(word):
    model, x = tiny(layers=word), tokens(2, 30)
    state = model.init_state(2, 40)
    model(x, state=state)
    twin = state.rows(torch.arange(2))
    a = model(tokens(2, 5, 1), state=state)
    model(tokens(2, 5, 2), state=state)
    torch.testing.assert_close(model(tokens(2, 5, 1), state=twin), a, rtol=0, atol=0)


@pytest.mark.parametrize("word", words())
def test_bfloat16_stays_close_to_float32(word):
    model, x = tiny(layers=word), tokens(2, 50)
    want = model(x)
    got = copy.deepcopy(model).to(torch.bfloat16)(x)
    assert got.dtype == torch.float32
    assert (got - want).abs().mean() < 0.05 * want.abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        assert (model(x) - want).abs().mean() < 0.05 * want.abs().mean()


COMPILED = [VARIANTS[name][0] for name in MIXERS] + [VARIANTS["hierarchical"][-1], "forgetting(sink_logit=True, gate=True)"]


@pytest.mark.slow
@pytest.mark.parametrize("word", COMPILED)
def test_compiled_is_eager_forward_and_backward(word):
    """By torch.compile's own compiler, whose loops are not eager's operations: rows past every border, plain and packed. The loss is
    the sum over real tokens: what padding gives is nobody's."""
    torch.compiler.reset()
    model, x = tiny(layers=word, n_layer=len(parse(word))).train(), tokens(4, 150)
    long = positions([150], [70, 1, 79], [-17, 133], [-5, 60, 75, -10], T=150)
    for pos in (None, long):
        targets = x.roll(-1, 1) if pos is None else x.roll(-1, 1).masked_fill(pos < 0, -1)
        found = [torch.autograd.grad(run(x, targets, pos), list(model.parameters())) for run in (model, torch.compile(model))]
        for (name, _), want, got in zip(model.named_parameters(), *found):
            assert (got - want).abs().max() < 1e-4 * want.abs().max() + 1e-6, name


@pytest.mark.parametrize("word", ["attention", "attention(window=7)"])
def test_a_full_row_is_refused_before_anything_is_written(word):
    model, x = tiny(layers=word), tokens(2, 30)
    state = model.init_state(2, 20)
    model(x[:, :15], state=state)
    before = copy.deepcopy(state.layers)
    if word == "attention":
        with pytest.raises(ValueError, match="holds 20 tokens a row"):
            model(x[:, 15:], state=state)
        assert all(torch.equal(a[n], b[n]) for a, b in zip(before, state.layers) for n in a) and state.length.tolist() == [15, 15]
        model(x[:, 15:20], state=state)
    else:                                                      # a ring goes on for ever
        torch.testing.assert_close(model(x[:, 15:], state=state), model(x)[:, 15:], **close)


def test_every_layer_sees_the_positions_that_came_before_the_call(monkeypatch):
    """C2: the length is advanced once, after the last block."""
    import mixers.attention as module
    model, seen, original = tiny(n_layer=3), [], module.attend
    monkeypatch.setattr(module, "attend", lambda q, k, v, at, **kw: seen.append(at.pos[0].tolist()) or original(q, k, v, at, **kw))
    fed(model, tokens(1, 8), [5, 1, 2])
    assert seen == [[0, 1, 2, 3, 4]] * 3 + [[5]] * 3 + [[6, 7]] * 3


def test_the_first_slot_holds_the_first_key():
    model = tiny()
    state = model.init_state(1, 8)
    model(tokens(1, 1), state=state)
    assert all(layer["k"][0, :, 0].abs().sum() > 0 for layer in state.layers)


@pytest.mark.parametrize("layers, message", [
    ("attentoin", "unknown mixer 'attentoin': did you mean 'attention'?"), ("attention(windw=3)", "attention has no option 'windw': did you mean 'window'?"),
    ("attention(window='x')", "window='x' is no int"), ("attention(window=-1)", "window=-1 must be at least 0"), ("attention*0", "n >= 1"),
    ("attention(3)", "cannot read"), ("attention(window=__import__('os'))", "an option's value is a number"), ("attention(", "cannot read"), ("", "empty"),
    ("attention*3", "does not fit into n_layer=2"), ("attention(window=True)", "window=True is no int"),
    ("attention(sinks=2)", "needs a window"), ("attention(window={[]: 1})", "an option's value is a number"), ("attention*2 attention", "does not fit"),
])
def test_a_wrong_pattern_is_one_line_that_says_what_would_be_right(layers, message):
    with pytest.raises(ValueError) as e:
        tiny(layers=layers)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_patterns_are_tiled():
    model = tiny(layers="attention(window=3)*2 attention", n_layer=5)
    assert [b.mixer.window for b in model.blocks] == [3, 3, 0, 3, 3]
    assert len(parse("attention|attention(window=4)*2")) == 2 and set(MIXERS) >= {"attention"}
