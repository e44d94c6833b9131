"""RoPE for longer contexts: the frequencies against transformers', and caches that stay exact under those that depend on length."""

import math

import pytest
import torch
from conftest import fed, tiny, tokens

from engine.generate import Batch, Options
from model import GPT, GPTConfig
from ops.rope import ROPE_SCALING, Rotation, inverse_frequencies, rope_scaling, rotate

REACH = torch.tensor([1, 700, 1024, 1025, 5000, 131072])
CALLS = {
    "linear": [dict(factor=1.0), dict(factor=4.0), dict(factor=13.7)],
    "dynamic": [dict(factor=2.0), dict(factor=8.0), dict(factor=1.0)],
    "yarn": [dict(factor=8.0), dict(factor=40.0, beta_fast=16.0, beta_slow=2.0), dict(factor=4.0, truncate=False), dict(factor=1.0),
             dict(factor=8.0, mscale=0.707, mscale_all_dim=1.0), dict(factor=16.0, attention_factor=1.3), dict(factor=2.0, beta_fast=1.0)],
    "longrope": [dict(factor=4.0), dict(factor=32.0, attention_factor=1.1), dict(factor=1.0)],
    "llama3": [dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), dict(factor=32.0, low_freq_factor=0.5, high_freq_factor=9.0)],
}
LENGTHWISE = ["dynamic(factor=4, original=24)", "longrope(factor=4, original=24, long=(1, 1.5, 2, 4), short=(1, 1, 1.1, 1.2), start=3)"]


def lists(D: int) -> dict[str, tuple[float, ...]]:
    return {"long": tuple(1 + 0.4 * i for i in range(D // 2)), "short": tuple(1 + 0.01 * i for i in range(D // 2))}


def written(kind: str, options: dict) -> str:
    return f"{kind}({', '.join(f'{k}={v!r}' for k, v in options.items())})"


@pytest.mark.parametrize("L, D, theta", [(1024, 64, 1e4), (8192, 128, 5e5), (256, 40, 1e6)])
@pytest.mark.parametrize("kind, options", [(kind, o) for kind, calls in CALLS.items() for o in calls], ids=str)
def test_frequencies_and_factors_are_transformers(kind, options, L, D, theta):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    mine, theirs = dict(options), dict(options)
    if kind == "longrope":
        mine |= lists(D)
        theirs |= {f"{name}_factor": list(f) for name, f in lists(D).items()}
    if kind != "linear":
        mine["original"] = L
        theirs["original_max_position_embeddings"] = L
    cfg = transformers.LlamaConfig(hidden_size=4 * D, num_attention_heads=4, head_dim=D, max_position_embeddings=L,
                                   rope_parameters={"rope_type": kind, "rope_theta": theta, **theirs})
    scaling = rope_scaling(written(kind, mine))
    got = scaling.frequencies(D, theta, REACH).expand(len(REACH), 1, 1, D // 2)[:, 0, 0]
    for row, length in zip(got, REACH.tolist()):
        want, factor = ROPE_INIT_FUNCTIONS[kind](cfg, "cpu", seq_len=length)
        torch.testing.assert_close(row.float(), want, rtol=1e-6 if kind != "dynamic" else 3e-6, atol=0)     # theirs: a float32 power
        assert math.isclose(scaling.scale(), factor, rel_tol=1e-6)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest():
    plain, got = inverse_frequencies(64), rope_scaling("ntk(factor=8)").frequencies(64, 1e4, REACH)
    torch.testing.assert_close(got[[0, -1]], plain[[0, -1]] / torch.tensor([1, 8]), rtol=1e-12, atol=0)
    assert ((plain / got).diff() > 0).all()
    static, longer = (rope_scaling(f"{k}").frequencies(64, 1e4, torch.tensor([2048])).flatten() for k in ("ntk(factor=9)", "dynamic(factor=8, original=1024)"))
    torch.testing.assert_close(static, longer, rtol=1e-12, atol=0)                   # 8 * 2048 / 1024 - 7


@pytest.mark.parametrize("text", ["linear(factor=1)", "ntk(factor=1)", "dynamic(factor=1, original=64)", "yarn(factor=1, original=64)",
                                  "yarn(factor=1, original=64, mscale=0.7, mscale_all_dim=1.0)", "longrope(factor=1, original=64)", "llama3(factor=1, original=64)"])
def test_a_factor_of_1_changes_nothing(text):
    x = tokens(2, 64)
    torch.testing.assert_close(tiny(rope_scaling=text)(x), tiny()(x), rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("text", ["linear(factor=32)", "yarn(factor=32, original=4096)", "llama3(factor=16)", "dynamic(factor=32, original=4096)"])
def test_scores_depend_on_distance_alone(text, layout):
    from ops.positions import Positions
    turn = Rotation(64, 1e4, text)
    q, k = (torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(s)) for s in (0, 1))

    def score(i, j):
        pos = torch.tensor([[i, j]])
        cos, sin = turn.table(Positions(1, 2, torch.device("cpu"), pos, reach=torch.tensor([131072])))
        (ci, cj), (si, sj) = cos.unbind(2), sin.unbind(2)
        both = rotate(q, ci[:, :, None], si[:, :, None], layout) * rotate(k, cj[:, :, None], sj[:, :, None], layout)
        return both.sum() / turn.scaling.scale() ** 2

    for i, j in [(0, 0), (5, 2), (1000, 999), (4000, 3)]:
        for shift in (7, 60000, 131072 - 4001):
            torch.testing.assert_close(score(i, j), score(i + shift, j + shift), rtol=0, atol=1e-5)


# what depends on length: one choice a row, kept

WORDS = ["attention", "attention(window=7, sinks=3)", "attention(theta=100.0) attention(scaling='none')", "mla(qk_rope_head_dim=8)", "linear",
         "sparse(pattern='first(3) | local(7)')", "forgetting", "attention(rotary=8)|linear"]


@pytest.mark.parametrize("scaling", LENGTHWISE)
@pytest.mark.parametrize("word", WORDS)
def test_pieces_and_caches_are_exact_although_frequencies_depend_on_length(word, scaling):
    """With n_head=4, n_embd=32 eight channels of a head are turned. Transformers' own cache is off by 0.34 here (docs/design.md)."""
    model, x = tiny(layers=word, rope_scaling=scaling), tokens(2, 60)
    want = model(x)
    assert not torch.allclose(want, tiny(layers=word)(x), atol=1e-2)
    for pieces in ([60], [1] * 60, [7, 30, 1, 1, 21]):
        torch.testing.assert_close(fed(model, x, pieces), want, rtol=1e-4, atol=1e-4)
    short = model(x[:, :20])                                     # up to the original length, nothing of the long frequencies
    state = model.init_state(2, 60)
    state.reach.fill_(20)
    torch.testing.assert_close(fed(model, x[:, :20], [5, 15], state), short, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(short, want[:, :20], atol=1e-2)


@pytest.mark.parametrize("scaling", LENGTHWISE)
def test_rows_of_one_batch_have_frequencies_of_their_own(scaling):
    """In training by the longest document of a row; in generation by the prompt and what may follow, whoever else is in the batch."""
    model, x = tiny(rope_scaling=scaling, block_size=64), tokens(2, 60)
    pos = torch.arange(60).expand(2, 60).clone()
    pos[1, 20:] = -1
    both = model(x, pos=pos)
    torch.testing.assert_close(both[1, :20], model(x[1:, :20])[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(both[0], model(x[:1])[0], rtol=1e-4, atol=1e-4)

    asked = {0: (x[0, :40].tolist(), 20), 1: (x[1, :9].tolist(), 6), 2: (x[1, :9].tolist(), 50), 3: (x[1, :30].tolist(), 9)}

    def texts(keys, width) -> dict[int, list[tuple[int, float]]]:
        batch, out = Batch(model, width), {k: [] for k in keys}
        for k in keys:
            batch.add(k, asked[k][0], Options(max_new_tokens=asked[k][1], logprobs=0), seed=k)
        while drawn := batch.step():
            for d in drawn:
                out[d.key].append((d.id, d.logprob))
        return out

    together = texts(asked, 2)
    for k, (prompt, n) in asked.items():
        ids, got = zip(*together[k])
        assert [i for i, _ in texts([k], 1)[k]] == [*ids] and len(ids) == n
        state = model.init_state(1, min(64, len(prompt) + n))
        logits = torch.cat([model(torch.tensor([prompt]), state=state)[:, -1:], fed(model, torch.tensor([ids[:-1]]), [1] * (n - 1), state)], 1)
        torch.testing.assert_close(torch.tensor(got), logits[0].log_softmax(-1)[range(n), ids], rtol=1e-4, atol=1e-4)
    assert abs(together[1][0][1] - together[2][0][1]) > 1e-2                 # the same prompt, and another choice


def test_start_tokens_keep_their_angles():
    from ops.positions import Positions
    at = Positions(1, 40, torch.device("cpu"), reach=torch.tensor([40]))
    scaled = Rotation(8, 1e4, "longrope(factor=4, original=24, long=(2, 2, 2, 2), start=3, attention_factor=1.0)").table(at)
    plain = Rotation(8, 1e4).table(at)
    for a, b in zip(scaled, plain):
        torch.testing.assert_close(a[:, :, :3], b[:, :, :3], rtol=0, atol=0)
        torch.testing.assert_close(a[:, :, 4::2], b[:, :, 2:20], rtol=0, atol=1e-6)


def test_each_layer_may_have_its_own_scaling():
    """Gemma 3: local layers as they were, global ones with another base, interpolated."""
    model = tiny(layers="attention(window=16, scaling='none') attention(theta=1e6, scaling='linear(factor=8)')")
    local, whole = (b.mixer.turn for b in model.blocks)
    assert (local.key, whole.key) == ((8, 1e4, "none"), (8, 1e6, "linear(factor=8)"))


@pytest.mark.parametrize("text, said", [
    ("yarn(factor=4)", "original"), ("yar(factor=4, original=8)", "did you mean 'yarn'"), ("linear", "factor"), ("linear(factor=0.5)", "at least 1"),
    ("linear(4)", "cannot read"), ("longrope(factor=2, original=8, long=(1, 2))", "long has 2 numbers, and 8 rotated channels need 4"),
    ("longrope(factor=2, original=8, short=(1, 2, 3, 0))", "above 0"), ("llama3(original=0)", "must be above 0"), ("ntk(alpha=2)", "no option 'alpha'")])
def test_what_cannot_be_is_said_in_one_line(text, said):
    with pytest.raises(ValueError, match="rope_scaling") as e:
        tiny(rope_scaling=text)
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("cfg", [dict(position="learned"), dict(layers="mamba2"), dict(layers="attention(rope=False)")])
def test_scaling_where_nothing_is_turned_is_refused(cfg):
    with pytest.raises(ValueError, match="is for layers that RoPE turns"):
        GPT(GPTConfig(**{**dict(n_embd=32, n_head=4, n_layer=2, vocab_size=65, rope_scaling="linear(factor=2)"), **cfg}))


def test_compiled_as_eager():
    model, x = tiny(rope_scaling=LENGTHWISE[1], block_size=64), tokens(2, 60)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x), model(x), rtol=1e-4, atol=1e-4)
    assert set(ROPE_SCALING) == {"none", "linear", "ntk", "dynamic", "yarn", "longrope", "llama3"}
