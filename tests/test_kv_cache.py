"""KV caches: exact where they promise it, their papers' rules where they drop or round, and of the size that they say."""

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens

from mixers import MIXERS
from mixers.attention import Attention, AttentionOptions
from mixers.kv_cache import KV_CACHES, kv_cache
from model import GPTConfig
from ops.positions import Positions
from ops.quantize import dequantized, packed, quantized, unpacked
from ops.rope import Rotation, rotate

COVERING = ["full", "int8(recent=64)", "int4(recent=64)", "streaming(sinks=0, window=64)", "streaming(sinks=4, window=60)", "h2o(budget=64, recent=5)",
            "snapkv(budget=64, recent=5)"]
LOSSY = ["int8(recent=3, group=4)", "int4(recent=5, group=3)", "streaming(sinks=3, window=9)", "streaming(sinks=0, window=7)",
         "h2o(budget=12, recent=5)", "snapkv(budget=12, recent=4, kernel=3)"]
SETTINGS = [dict(n_kv_head=2), dict(n_kv_head=1, position="alibi"), dict(rope_layout="interleaved", qk_norm=True, attn_softcap=5.0),
            dict(n_kv_head=2, layers="attention(sink_logit=True, gate=True, rotary=4)")]


def module(cache: str, **cfg) -> Attention:
    torch.manual_seed(0)
    m = Attention(GPTConfig(**{**dict(n_embd=32, n_head=4, n_kv_head=2, kv_cache=cache), **cfg}), AttentionOptions()).eval()
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(4)
    return m


@torch.no_grad()
def step_by_step(m: Attention, x: torch.Tensor, pieces: list[int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The outputs for x (1, T, C) in pieces, and the state after."""
    state, out, i = m.init_state(1, x.shape[1], torch.float32, torch.device("cpu")), [], 0
    for n in pieces:
        at = Positions(1, n, x.device, None, torch.tensor([i]), i, reach=torch.tensor(x.shape[1:2]))
        out.append(m(x[:, i:i + n], at, state))
        i += n
    return torch.cat(out, 1), state


def attended(m: Attention, q, k, v) -> torch.Tensor:
    """One query (H, D) over keys and values (G, S, D): (weights (H, S), the layer's output (C,))."""
    k, v = (t.repeat_interleave(m.H // m.G, 0) for t in (k, v))
    w = (torch.einsum("hd,hsd->hs", q, k) * m.D**-0.5).softmax(-1)
    return w, m.out(torch.einsum("hs,hsd->hd", w, v).flatten())


@torch.no_grad()
@pytest.mark.parametrize("cfg", SETTINGS, ids=str)
@pytest.mark.parametrize("cache", COVERING)
def test_a_budget_that_covers_everything_is_exact(cache, cfg):
    model, x = tiny(kv_cache=cache, **cfg), tokens(2, 64)
    for pieces in ([64], [13, 1, 1, 30, 19], [1] * 64):
        torch.testing.assert_close(fed(model, x, pieces), model(x), rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("cache", COVERING + LOSSY)
def test_rows_with_padding_and_documents_are_as_alone(cache):
    """A row's padding, its neighbours and what older documents left change nothing; lossy ones get the same pieces of their rows."""
    model, x, pad = tiny(kv_cache=cache, n_kv_head=2), tokens(3, 48), torch.full((1,), -1)
    run = torch.arange(48)
    pos = torch.stack([run, torch.cat([run[:21], pad.expand(3), run[:24]]), torch.cat([run[:17], run[:7], run[:24]])])
    together = fed(model, x, [24, 24 - 5, 1, 1, 3], pos=pos)
    alone = torch.stack([fed(model, x[i:i + 1], [24, 24 - 5, 1, 1, 3], pos=pos[i:i + 1])[0] for i in range(3)])
    torch.testing.assert_close(together[pos >= 0], alone[pos >= 0], rtol=1e-4, atol=2e-5)
    fresh = fed(model, x[:, 24:], [19, 1, 1, 3])                                     # rows 1 and 2: a document of its own
    torch.testing.assert_close(together[1:, 24:], fresh[1:], rtol=1e-4, atol=2e-5)
    short = fed(model, x[1:2, :21], [21])                                            # the padding behind it left no trace
    torch.testing.assert_close(together[1:2, :21], short, rtol=1e-4, atol=2e-5)
    state, others = model.init_state(2, 64), model.init_state(1, 64)                 # nor does padding before a prompt
    later = torch.cat([torch.full((2, 5), -1), run[:9].expand(2, 9)], 1)
    later[1] = torch.cat([run[:9], torch.full((5,), -1)])
    both = torch.stack([torch.cat([x[0, :5], x[0, 5:14]]), torch.cat([x[0, 5:14], x[0, :5]])])
    model(both, pos=later, state=state)
    model(x[:1, 5:14], state=others)
    for _ in range(12):
        got, want = model(x[:1, 20:21].expand(2, 1), state=state), model(x[:1, 20:21], state=others)
        torch.testing.assert_close(got, want.expand_as(got), rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("cache", COVERING + LOSSY)
def test_a_copied_state_goes_on_alike(cache):
    model, x = tiny(kv_cache=cache), tokens(2, 60)
    state = model.init_state(2, 64)
    fed(model, x[:, :30], [25, 1, 1, 3], state)
    copy = state.rows(torch.tensor([1, 0, 1]))
    a, b = fed(model, x[:, 30:], [1] * 20 + [10], state), fed(model, x[[1, 0, 1], 30:], [1] * 20 + [10], copy)
    torch.testing.assert_close(b, a[[1, 0, 1]], rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", ["none", "yarn(factor=4, original=100, beta_fast=8)", "longrope(factor=4, original=16, start=2)"])
@pytest.mark.parametrize("pieces", [[40], [1] * 40, [3, 20, 1, 1, 15]], ids=str)
def test_streaming_rotates_by_places_in_the_cache(pieces, layout, scaling):
    """StreamingLLM as its paper says it: keys unrotated, positions 0, 1, 2, ... along what is kept."""
    sinks, window = 3, 6
    m, x = module("streaming(sinks=3, window=6)", rope_layout=layout, rope_scaling=scaling), torch.randn(1, 40, 32)
    got, state = step_by_step(m, x, pieces)
    q, k, v = m.qkv(x).view(1, 40, -1, m.D).transpose(1, 2).split([4, 2, 2], 1)
    for t in range(40):
        kept = [j for j in range(t + 1) if j < sinks or j > t - window]
        cos, sin = Rotation(m.D, 10000.0, scaling).table(Positions(1, len(kept), x.device, reach=torch.tensor([40])))
        keys, query = rotate(k[:, :, kept], cos, sin, layout), rotate(q[:, :, t:t + 1], cos[:, :, -1:], sin[:, :, -1:], layout)
        torch.testing.assert_close(got[0, t], attended(m, query[0, :, 0], keys[0], v[0][:, kept])[1], rtol=1e-4, atol=1e-5)
    assert state["k"].shape[2] == 3 + 6 + 1 == m.cache.allocate(m, 1, 5, torch.float32, torch.device("cpu"))["k"].shape[2]


@torch.no_grad()
def test_h2o_keeps_what_got_most_weight():
    """Against the paper's rule, written out a head at a time."""
    m, x, T = module("h2o(budget=8, recent=3)"), torch.randn(1, 40, 32), 40
    got, state = step_by_step(m, x, [1] * T)
    q, k, v = (t[0] for t in m.heads(x, Positions(1, T, x.device)))
    kept: list[dict[int, float]] = [{}, {}]                          # a head's positions, and the weight that each has got
    for t in range(T):
        y = torch.zeros(4, m.D)
        for g in range(2):
            kept[g][t] = 0.0
            at = sorted(kept[g])
            for h in (2 * g, 2 * g + 1):
                w = (k[g, at] @ q[h, t] * m.D**-0.5).softmax(0)
                y[h] = w @ v[g, at]
                for j, weight in zip(at, w.tolist()):
                    kept[g][j] += weight
            if len(kept[g]) > 8:
                del kept[g][min((j for j in kept[g] if j <= t - 3), key=lambda j: kept[g][j])]
        torch.testing.assert_close(got[0, t], m.out(y.flatten()), rtol=1e-4, atol=1e-5)
    for g in range(2):
        assert (state["place"][0, g] - 1).tolist() == sorted(kept[g]) and set(range(T - 3, T)) <= set(kept[g])
        torch.testing.assert_close(state["score"][0, g], torch.tensor([kept[g][j] for j in sorted(kept[g])]), rtol=1e-4, atol=1e-5)
    assert kept[0].keys() != kept[1].keys() and min(kept[0]) < 20     # heads choose for themselves, and older than what is recent


@torch.no_grad()
def test_snapkv_keeps_what_the_last_queries_look_at():
    """Against the paper's rule: the observation window's weights, averaged over neighbours, and the window itself."""
    m, x, T = module("snapkv(budget=12, recent=4, kernel=3)"), torch.randn(1, 40, 32), 40
    _, state = step_by_step(m, x, [T])
    q, k, v = (t[0] for t in m.heads(x, Positions(1, T, x.device)))
    s = torch.einsum("htd,hsd->hts", q, k.repeat_interleave(2, 0)) * m.D**-0.5
    w = s.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)[:, -4:].mean(1).unflatten(0, (2, 2)).mean(1)   # (G, S)
    pooled = F.avg_pool1d(w, 3, 1, 1, count_include_pad=False)[:, :-4]
    for g in range(2):
        want = sorted(pooled[g].topk(8).indices.tolist()) + list(range(36, 40))
        assert (state["place"][0, g] - 1).tolist() == want
        torch.testing.assert_close(state["k"][0, g], k[g, want], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["v"][0, g], v[g, want], rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("cache", ["h2o(budget=9, recent=4)", "snapkv(budget=9, recent=4)"])
def test_the_budget_holds_and_the_newest_stay(cache):
    model, x = tiny(kv_cache=cache, n_kv_head=2), tokens(2, 120)
    state, done = model.init_state(2, 10), 0                          # text of any length: max_len is no bound
    for n in [5, 1, 1, 30, 1, 60, 22]:
        fed(model, x[:, done:done + n], [n], state)
        done += n
        for layer in state.layers:
            assert layer["place"].shape[2] == 9
            held = layer["place"] - 1
            assert ((held >= 0).sum(-1) == min(done, 9)).all() and (held.sort(-1).values[..., -min(done, 4):] == torch.arange(max(0, done - 4), done)).all()


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("pieces", [[50], [1] * 50, [7, 21, 1, 1, 20]], ids=str)
def test_rounded_keys_and_values_are_kivis(bits, pieces):
    """Keys by channel over a group of tokens, values by token; the newest as they are; each token is attended to as it is kept."""
    m, x, T, R, g = module(f"int{bits}(recent=5, group=4)"), torch.randn(1, 50, 32), 50, 5, 4
    got, state = step_by_step(m, x, pieces)
    q, k, v = (t[0] for t in m.heads(x, Positions(1, T, x.device)))

    def rounded(t: torch.Tensor, dim: int) -> torch.Tensor:
        low, high = t.amin(dim, keepdim=True), t.amax(dim, keepdim=True)
        scale, low = ((high - low) / (2**bits - 1)).half().float(), low.half().float()
        return ((t - low) / scale).round().clamp(0, 2**bits - 1) * scale + low

    whole = T // g * g
    k_, v_ = rounded(k[:, :whole].unflatten(1, (-1, g)), 2).flatten(1, 2), rounded(v, 2)
    ready = (T - R) // g * g
    for name, want in (("k", k_), ("v", v_)):
        kept = dequantized(state[name], state[f"{name}_scale"], bits, torch.float32)[0, :, :ready // g].flatten(1, 2)
        torch.testing.assert_close(kept, want[:, :ready], rtol=1e-5, atol=1e-5)
    if pieces == [1] * 50:
        for t in range(T):
            n = max(0, t - R) // g * g                               # what was rounded before this token came
            keys, values = torch.cat([k_[:, :n], k[:, n:t + 1]], 1), torch.cat([v_[:, :n], v[:, n:t + 1]], 1)
            torch.testing.assert_close(got[0, t], attended(m, q[:, t], keys, values)[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_is_off_by_half_a_step(bits):
    x = torch.randn(3, 5, 16, 8) * torch.logspace(-3, 3, 8)
    for dim in (-1, -2):
        codes, pair = quantized(x, bits, dim)
        assert torch.equal(unpacked(packed(codes, bits), bits), codes) and packed(codes, bits).numel() == x.numel() * bits // 8
        back = dequantized(packed(codes, bits), pair, bits, torch.float32)
        step = (x.amax(dim, keepdim=True) - x.amin(dim, keepdim=True)) / (2**bits - 1)
        assert ((back - x).abs() <= 0.5 * step * 1.01 + 1e-3 * x.abs().amax(dim, keepdim=True) + 1e-7).all()    # float16 has 11 bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", ["full", "int8", "int4", "streaming", "h2o", "snapkv"])
def test_bytes_by_formula_are_bytes_allocated(cache, dtype):
    model, n = tiny(kv_cache=cache, n_head=4, n_kv_head=2, n_embd=256), 4096
    state = model.init_state(3, n, dtype=dtype)
    counted = sum(t.untyped_storage().nbytes() for layer in state.layers for t in layer.values())
    formula = 3 * sum(block.mixer.cache.nbytes(block.mixer, n, dtype.itemsize) for block in model.blocks)
    assert abs(formula / counted - 1) < 0.02
    full = 2 * 2 * 2 * 64 * n * dtype.itemsize * 3                   # layers, k and v, heads, width, tokens
    assert formula < full / {"full": 0.99, "int8": 1.6, "int4": 2.7, "streaming": 3.9, "h2o": 7, "snapkv": 7}[cache]


@pytest.mark.parametrize("word", MIXERS)
def test_what_keeps_no_such_cache_says_so(word):
    for cache in KV_CACHES:
        if word == "attention" or cache == "full":
            tiny(layers=word, kv_cache=cache)
        else:
            with pytest.raises(ValueError, match=f"kv_cache={cache} is for attention without a window"):
                tiny(layers=word, kv_cache=cache)
    with pytest.raises(ValueError, match="kv_cache=int8 is for attention without a window"):
        tiny(layers="attention(window=5)", kv_cache="int8")
    model = tiny(layers="gated_deltanet attention", kv_cache="int8")
    assert "k_scale" in model.init_state(1, 64).layers[1] and "k_scale" not in model.init_state(1, 64).layers[0]


@pytest.mark.parametrize("text, message", [
    ("int9", "unknown 'int9': did you mean 'int8'?"), ("streaming(sink=4)", "streaming has no option 'sink': did you mean 'sinks'?"),
    ("h2o(budget=0)", "budget=0 must be above 0"), ("h2o(budget=4)", "recent=256 must be at most 4"), ("snapkv(kernel=4)", "kernel=4 must be odd"),
    ("int8(bits=2)", "int8 has no option 'bits'"), ("full(", "cannot read 'full('"), ("a.b", "cannot read 'a.b'"), ("int8(3)", "cannot read"),
    ("int8(group='x')", "group='x' is no int")])
def test_mistakes_are_one_line(text, message):
    with pytest.raises(ValueError) as e:
        kv_cache(text)
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("cache, layers", [("full", "attention(window=60, sinks=4)"), ("streaming(sinks=4, window=60)", "attention")])
def test_a_million_tokens_in_flat_memory(cache, layers):
    """And the last of them as exact as the first: what is left of a million tokens is what a short text of the same tokens has."""
    resource = pytest.importorskip("resource")
    model, x, n = tiny(kv_cache=cache, layers=layers, n_layer=1, block_size=64), tokens(1, 1024), 1_000_000
    state, early = model.init_state(1, 64), 0
    for i in range(0, n, 512):
        y = model.hidden(x[:, i % 1024:i % 1024 + 512], state=state)
        early = early or (i > n // 10) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert int(state.length) == n // 512 * 512 + 512 and sum(t.numel() for t in state.layers[0].values()) == 2 * 65 * 32
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < early + 20_000            # kilobytes
    if cache != "full":                                                                   # sinks of a ring keep their true distance
        end = i % 1024 + 512
        short = model(torch.cat([x[:, :4], x[:, end - 60:end]], 1))
        torch.testing.assert_close(model.logits(y)[:, -1], short[:, -1], rtol=1e-3, atol=1e-3)
