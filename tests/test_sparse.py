"""Sparse attention: who sees whom by tables and loops, gathered keys against the reference, states, costs, pictures."""

import importlib.util
import subprocess
import sys
from collections import defaultdict
from itertools import combinations

import pytest
import torch
from conftest import ROOT, fed, tiny, tokens

import ops.sparse as module
from mixers.sparse import parse
from model import GPTConfig
from ops.attend import How, attend
from ops.patterns import draw, picture, table
from ops.positions import Positions, visible
from ops.sparse import gathered, make_parts, pairs, plan, sparse

CPU = torch.device("cpu")

# what each says, as a loop would have it; drawn blocks are read from `draw`, which has its own test
LOOPS = {
    "full()": lambda i, j, h: True,
    "local(7)": lambda i, j, h: i - j < 7,
    "first(3)": lambda i, j, h: j < 3,
    "strided(5)": lambda i, j, h: (i - j) % 5 == 0,
    "columns(7, 2)": lambda i, j, h: j % 7 in (5, 6),
    "chunk(9)": lambda i, j, h: i // 9 == j // 9,
    "fixed(8)": lambda i, j, h: i // 8 == j // 8 or j % 8 == 7,
    "fixed(8, summary=3)": lambda i, j, h: i // 8 == j // 8 or j % 8 >= 5,
    "first(3) | local(7)": lambda i, j, h: j < 3 or i - j < 7,
    "local(9) | strided(5)": lambda i, j, h: i - j < 9 or (i - j) % 5 == 0,
    "local(30) & strided(5)": lambda i, j, h: i - j < 30 and (i - j) % 5 == 0,
    "(local(30) | first(9)) & strided(3)": lambda i, j, h: (i - j < 30 or j < 9) and (i - j) % 3 == 0,
    "local(5) & local(9) | columns(5) & local(20)": lambda i, j, h: i - j < 5 or (i - j < 20 and j % 5 == 4),
    "local_blocks(3, 8)": lambda i, j, h: i // 8 - j // 8 in (0, 1, 2),
    "first(4) | local_blocks(2, 4) | random_blocks(2, 4)": lambda i, j, h: j < 4 or i // 4 - j // 4 < 2 or j // 4 in drawn(2, i // 4, h),
    "random_blocks(3, 8, seed=1)": lambda i, j, h: j // 8 in drawn(3, i // 8, h, 1),
    "random_blocks(2, 8) & strided(2)": lambda i, j, h: j // 8 in drawn(2, i // 8, h) and (i - j) % 2 == 0,
    "random_blocks(2, 6) & random_blocks(1, 4)": lambda i, j, h: j // 6 in drawn(2, i // 6, h) and j // 4 in drawn(1, i // 4, h),
    "local(6) / strided(5)": lambda i, j, h: i - j < 6 if h % 2 == 0 else (i - j) % 5 == 0,
    "local(6) / full() / random_blocks(1, 8) / first(2)": lambda i, j, h: [i - j < 6, True, j // 8 in drawn(1, i // 8, h), j < 2][h],
}


def drawn(count, block, head, seed=0):
    return [int(b) for b in draw(count, torch.tensor(block), torch.tensor(head), seed) if b >= 0]


def looped(text, T, head):
    return torch.tensor([[j <= i and bool(LOOPS[text](i, j, head)) for j in range(T)] for i in range(T)])


def qkv(T, H=4, G=2, D=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(2, h, T, D, generator=g).requires_grad_() for h in (H, G, G)]


# who sees whom

STRIDED = """
#...............
##..............
###.............
####............
#####...........
.#####..........
..#####.........
...#####........
#...#####.......
.#...#####......
..#...#####.....
...#...#####....
#...#...#####...
.#...#...#####..
..#...#...#####.
...#...#...#####
"""
FIXED = """
#...............
##..............
###.............
####............
...##...........
...###..........
...####.........
...#####........
...#...##.......
...#...###......
...#...####.....
...#...#####....
...#...#...##...
...#...#...###..
...#...#...####.
...#...#...#####
"""


def test_strided_and_fixed_are_the_literal_tables():
    """l = 4 and T = 16, as in the Sparse Transformer's figure 3, every key of the local half among them."""
    assert picture(parse("local(4) | strided(4)"), 16) == STRIDED.strip()
    assert picture(parse("fixed(4)"), 16) == FIXED.strip()


@pytest.mark.parametrize("text", LOOPS)
def test_masks_are_what_a_loop_says(text):
    for head in range(4):
        assert torch.equal(table(parse(text), 50, head), looped(text, 50, head))


def test_masks_are_transformers():
    masks = pytest.importorskip("transformers.masking_utils")
    q, k = torch.arange(40)[:, None], torch.arange(40)
    theirs = masks.chunked_causal_mask_function(7, torch.zeros(1, dtype=torch.long))(torch.tensor(0), torch.tensor(0), q, k)
    assert torch.equal(table(parse("chunk(7)"), 40), theirs)
    theirs = masks.sliding_window_causal_mask_function(6)(0, 0, q, k)
    assert torch.equal(table(parse("local(6)"), 40), theirs)


@pytest.mark.parametrize("a, b", [("full()", "local(50)"), ("full()", "strided(1)"), ("full()", "chunk(50)"), ("full()", "first(50)"), ("full()", "columns(3, 3)"),
    ("full()", "local_blocks(7, 8)"), ("full()", "chunk(8) | random_blocks(6, 8)"), ("local(1)", "strided(50)"), ("local(8)", "local_blocks(8, 1)"),
    ("fixed(6, 2)", "chunk(6) | columns(6, 2)"), ("local(5) | strided(4)", "strided(4) | local(5)"), ("local(5) & strided(4)", "strided(4) & local(5)"),
    ("local(9) | local(5)", "local(9)"), ("local(9) & local(5)", "local(5)"), ("strided(4) & strided(6)", "strided(12)"), ("first(3) & full()", "first(3)"),
    ("(local(9) | first(2)) & strided(2)", "local(9) & strided(2) | first(2) & strided(2)"), ("local(3) | first(4) & strided(2)", "local(3) | (first(4) & strided(2))"),
    ("local(4) / local(4)", "local(4)"), ("random_blocks(2, 4)", "random_blocks(count=2, size=4, seed=0)")])
def test_laws_of_composition(a, b):
    for head in (0, 1):
        assert torch.equal(table(parse(a), 50, head), table(parse(b), 50, head))


def test_drawn_blocks_are_different_earlier_and_the_same_in_every_call():
    blocks, heads = torch.arange(40), torch.arange(8)[:, None]
    got = torch.stack(draw(3, blocks, heads, 5), -1)                    # (heads, blocks, 3)
    for block in range(40):
        for head in range(8):
            some = got[head, block][got[head, block] >= 0].tolist()
            assert len(set(some)) == len(some) == min(3, block) and all(b < block for b in some)
    assert torch.equal(got[3, 17], torch.stack(draw(3, torch.tensor(17), torch.tensor(3), 5)))
    differ = (got.sort(-1).values[:, 10:] != torch.stack(draw(3, blocks, heads, 6), -1).sort(-1).values[:, 10:]).any(-1)
    assert differ.float().mean() > 0.9, "another seed draws others"
    assert (got[:, 10:].sort(-1).values[0] != got[:, 10:].sort(-1).values[1]).any(-1).float().mean() > 0.9, "so does another head"
    assert torch.equal(table(parse("random_blocks(2, 4)"), 64)[:40, :40], table(parse("random_blocks(2, 4)"), 40)), "whatever T"


def test_every_subset_is_as_likely_as_any_other():
    got = torch.stack(draw(3, torch.tensor(6), torch.arange(40000), 0), -1).sort(-1).values
    counts = {some: int((got == torch.tensor(some)).all(-1).sum()) for some in combinations(range(6), 3)}
    assert sum(counts.values()) == 40000
    assert sum((n - 2000) ** 2 / 2000 for n in counts.values()) < 43.8      # chi-square of 19 degrees, p = 0.001


# what computes it

@pytest.mark.parametrize("block", [4, 32])
@pytest.mark.parametrize("text", LOOPS)
def test_gathered_keys_give_the_references_outputs_and_gradients(text, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    pattern = parse(text)
    for T, how in [(1, {}), (33, dict(softcap=2.0)), (130, {}), (130, dict(slopes=torch.tensor([0.5, 0.25, 0.1, 0.05])))]:
        results = []
        for fast in (False, True):
            (q, k, v), at = qkv(T), Positions(2, T, CPU)
            y = gathered(q, k, v, at, pattern, How(**how)) if fast else attend(q, k, v, at, backend="reference", keep=pattern, **how)
            results.append((y, *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), (q, k, v))))
        for want, got in zip(*results):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", LOOPS)
def test_every_seen_pair_is_gathered_once(text):
    pattern = parse(text)
    for i, kind in enumerate(getattr(pattern, "kinds", [pattern])):
        seen = torch.zeros(100, 100, dtype=torch.long)
        for part in make_parts(kind, 100, torch.tensor([i])):
            q, k = torch.broadcast_tensors(part.queries[:, :, None], part.keys[0][:, None])
            inside = part.mask[0] & (q < 100)
            seen.index_put_((q[inside], k[inside]), torch.ones(int(inside.sum()), dtype=torch.long), accumulate=True)
        assert torch.equal(seen, looped(text, 100, i).long())


@pytest.mark.parametrize("text, attended", [
    ("local(64)", lambda T: 64 * T), ("strided(32)", lambda T: T * T // 32), ("local(32) | strided(32)", lambda T: 32 * T + T * T // 32), ("fixed(64)", lambda T: 64 * T + T * T // 64),
    ("chunk(64)", lambda T: 64 * T), ("first(4) | local(64)", lambda T: 68 * T), ("local(512) & strided(8)", lambda T: 64 * T),
    ("first(64) | local_blocks(3) | random_blocks(2)", lambda T: 384 * T), ("local(64) / strided(16)", lambda T: 32 * T + T * T // 32), ("full()", lambda T: T * T)])
def test_the_cost_grows_with_the_keys_seen(text, attended):
    """Not more than twice the keys that queries far from the beginning see, at every length; and what is counted is what is made."""
    pattern = parse(text)
    for T in (1024, 4096, 65536):
        assert 0.5 * attended(T) <= pairs(pattern, T) <= 2.1 * attended(T)
    kinds = getattr(pattern, "kinds", [pattern])
    made = [part.mask.shape for i, kind in enumerate(kinds) for part in make_parts(kind, 1024, torch.tensor([i]))]
    assert sum(n * queries * keys for _, n, queries, keys in made) == len(kinds) * pairs(pattern, 1024)


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest tensor that any operation makes, backward included, and what dtypes each makes."""

    def __init__(self):
        super().__init__()
        self.largest, self.dtypes = 0, defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.untyped_storage().nbytes() // t.element_size())
                self.dtypes[func.overloadpacket.__name__].add(t.dtype)
        return out


@pytest.mark.parametrize("text", ["local(32)", "local(64) | strided(64)", "fixed(64)", "first(8) | local_blocks(2, 32) | random_blocks(1, 32)"])
def test_no_tensor_is_as_large_as_T_squared(text):
    q, k, v = (t[:1, :1].detach().requires_grad_() for t in qkv(4096, H=1, G=1))
    with Watch() as watch:
        sparse(q, k, v, Positions(1, 4096, CPU), parse(text)).sum().backward()
    assert 4096 * 32 <= watch.largest <= 4096 * 130


@pytest.mark.parametrize("text", ["fixed(8)", "local(6) / strided(5)", "first(4) | local_blocks(2, 4) | random_blocks(2, 4)"])
def test_documents_are_masked_a_few_queries_at_a_time(text, monkeypatch):
    monkeypatch.setattr(module, "ROWS", 16)
    pos = torch.stack([torch.cat([torch.arange(n) for n in (20, 1, 29)]), torch.cat([torch.full((7,), -1), torch.arange(38), torch.full((5,), -1)])])
    results, kept = [], []
    for backend in ("reference", "auto"):
        (q, k, v), kept = qkv(50), []
        with Watch() as watch, torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t):
            y = sparse(q, k, v, Positions(2, 50, CPU, pos), parse(text), backend=backend)
            grads = torch.autograd.grad(y.sin().sum(), (q, k, v))
        results.append((y, *grads))
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    doc = (pos == 0).cumsum(1)
    for row in range(2):                                               # the reference itself: visible and the table
        seen = visible(pos[row][:, None], pos[row], doc[row][:, None], doc[row]) & parse(text).see(pos[row][:, None], pos[row], torch.tensor(3))
        w = attend(q, k, v, Positions(2, 50, CPU, pos), keep=parse(text), need_weights=True)[1]
        assert torch.equal(w[row, 3] > 0, seen)
    assert watch.largest <= 2 * 4 * 16 * 50, "no mask of all queries"
    assert not any(shape[-2:] == (16, 50) for shape in kept), "none of a few is kept for backward"


@pytest.mark.parametrize("text, heads", [("first(3) | local(7)", 1), ("local(6) / strided(5)", 4), ("random_blocks(2, 8) | chunk(8)", 4)])
def test_flex_masks_by_the_same_function(text, heads):
    (q, k, v), at = (t.detach() for t in qkv(70)), Positions(2, 70, CPU)
    want = sparse(q, k, v, Positions(2, 70, CPU), parse(text), backend="reference")
    torch.testing.assert_close(sparse(q, k, v, at, parse(text), backend="flex"), want, rtol=1e-5, atol=2e-6)
    assert [mask.shape for key, mask in at.memo.items() if key[0] == "flex"] == [(1, heads, 70, 70)]


@pytest.mark.parametrize("backend", ["reference", "sdpa", "flex"])
def test_layers_of_different_patterns_do_not_share_masks_and_equal_ones_do(backend):
    q, k, v = (t.detach() for t in qkv(40))
    at, run = Positions(2, 40, CPU), lambda at, text: attend(q, k, v, at, keep=parse(text), backend=backend)
    run(at, "local(9)")
    masks = len(at.memo)
    torch.testing.assert_close(run(at, "chunk(8)"), run(Positions(2, 40, CPU), "chunk(8)"), rtol=0, atol=0)
    assert len(at.memo) > masks
    masks = len(at.memo)
    run(at, "local(9)")
    assert len(at.memo) == masks


def test_half_precision_has_statistics_in_float32():
    q, k, v = (t.detach().bfloat16() for t in qkv(300))
    want = attend(q, k, v, Positions(2, 300, CPU), keep=parse("local(64) | strided(8)"), backend="reference")
    with Watch() as watch:
        got = gathered(q, k, v, Positions(2, 300, CPU), parse("local(64) | strided(8)"), How())
    assert got.dtype == torch.bfloat16 and (got - want).abs().mean() < 0.01 * want.abs().mean()
    assert watch.dtypes["exp_"] == {torch.float32}


# the word

@pytest.mark.parametrize("text", ["full()", "local(200)", "strided(1)", "chunk(200)", "first(200)", "chunk(16) | random_blocks(16, 16)", "local(20) | full() & strided(1)"])
def test_patterns_that_leave_nothing_out_are_attention(text):
    model, full = tiny(layers=f"sparse(pattern='{text}')"), tiny()
    full.load_state_dict(model.state_dict())
    x = tokens(2, 150)
    torch.testing.assert_close(model(x), full(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("text, other", [("local(9)", "window=9"), ("first(3) | local(9)", "window=9, sinks=3")])
def test_windows_and_sinks_are_attentions(text, other):
    model, windowed = tiny(layers=f"sparse(pattern='{text}')"), tiny(layers=f"attention({other})")
    windowed.load_state_dict(model.state_dict())
    x = tokens(2, 150)
    torch.testing.assert_close(model(x), windowed(x), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(fed(model, x, [40, 1, 1, 100, 8]), windowed(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("text", ["local(32) | strided(32)", "first(4) | local(20)", "chunk(40)", "fixed(16, 2)", "first(8) | local_blocks(2, 8) | random_blocks(2, 8)",
                                  "local(16) / strided(16)", "local(64) & strided(4)"])
@pytest.mark.parametrize("pieces", [[100, 1, 1, 98], [33, 1, 30, 1, 1, 64, 70], [1] * 200])
def test_decoding_gives_what_training_gives_past_every_border(text, pieces):
    model, x = tiny(layers=f"sparse(pattern='{text}')", n_kv_head=2, n_layer=1), tokens(2, 200)
    torch.testing.assert_close(fed(model, x, pieces, model.init_state(2, 256)), model(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("text, slots", [("local(20)", 20), ("chunk(20)", 20), ("first(4) | local(20)", 24), ("first(4)", 5), ("local_blocks(3, 8)", 24), ("local(60) & strided(4)", 60),
    ("local(9) & full() | chunk(20)", 20), ("first(3) & local(9)", 4), ("local(20) / first(2) | local(9)", 22), ("strided(4)", 1000), ("fixed(8)", 1000), ("local(8) | random_blocks(1, 8)", 1000), ("full()", 1000)])
def test_a_state_keeps_what_can_still_be_seen(text, slots):
    """And one slot for what need not be kept; 2 tensors of (B, G, slots, D) float32."""
    model = tiny(layers=f"sparse(pattern='{text}')", n_layer=1, n_kv_head=2)
    layer = model.init_state(3, 1000).layers[0]
    assert sum(t.numel() * t.element_size() for t in layer.values()) == 2 * 3 * 2 * (slots + 1) * 8 * 4
    assert model.blocks[0].mixer.endless(1000) == (slots < 1000)
    for head in range(4):                                              # no key is seen that the ring has let go
        first, window = parse(text).bound()
        q, k = torch.arange(200)[:, None], torch.arange(200)
        assert not (table(parse(text), 200, head) & (k >= first) & (q - k >= window)).any()


def test_a_bounded_pattern_goes_on_past_its_state_and_the_models_window_is_not_its():
    model, x = tiny(layers="sparse(pattern='first(2) | chunk(8)')", window=3, sinks=1), tokens(2, 60)
    state = model.init_state(2, 16)
    torch.testing.assert_close(fed(model, x, [10, 1, 30, 19], state), model(x), rtol=1e-5, atol=2e-5)
    assert (model.blocks[0].mixer.window, model.blocks[0].mixer.sinks) == (8, 2)
    assert tiny(layers="sparse(pattern='strided(8)')", window=3).blocks[0].mixer.window == 0


@pytest.mark.parametrize("fields", [dict(position="alibi"), dict(attn_softcap=3.0), dict(qk_norm=True, position="none"), dict(n_kv_head=1, head_dim=6)])
def test_the_models_settings_hold(fields):
    model, x = tiny(layers="sparse(pattern='local(8) | strided(8)')", **fields), tokens(2, 100)
    slow = tiny(layers="sparse(pattern='local(8) | strided(8)')", attention_backend="reference", **fields)
    torch.testing.assert_close(model(x), slow(x), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(fed(model, x, [70, 1, 29]), slow(x), rtol=1e-5, atol=2e-5)


def test_dropout_of_weights_has_the_mean_of_none():
    q, k, v = (t.detach() for t in qkv(40))
    want, runs = gathered(q, k, v, Positions(2, 40, CPU), parse("local(4) | strided(4)"), How()), []
    for seed in range(2000):
        torch.manual_seed(seed)
        runs.append(gathered(q, k, v, Positions(2, 40, CPU), parse("local(4) | strided(4)"), How(dropout=0.3)))
    torch.testing.assert_close(torch.stack(runs).mean(0), want, rtol=0.1, atol=0.1)


def test_flops_count_the_keys_of_the_last_query():
    count = lambda text: tiny(layers=f"sparse(pattern='{text}')").blocks[0].mixer.flops(128) / (4 * 4 * 8)
    assert (count("full()"), count("local(16)"), count("strided(8)"), count("local(16) / full()")) == (128, 16, 16, 72)
    assert count("fixed(16)") == 16 + 7 and count("local(16) | strided(16)") == 16 + 7


def test_the_log_says_what_computes_it():
    mixer = tiny(layers="sparse", head_dim=16).blocks[0].mixer
    assert [mixer.backend(d, torch.bfloat16, True) for d in ("cpu", "cuda")] == ["gathered", "flex"]
    assert mixer.backend("cuda", torch.bfloat16, False) == "gathered"
    assert tiny(layers="sparse", attention_backend="reference").blocks[0].mixer.backend("cpu", torch.float32, True) == "reference"


@pytest.mark.parametrize("word", ["sparse", "sparse(pattern='first(4) | local_blocks(2, 8) | random_blocks(2, 8)')", "sparse(pattern='local(6) / fixed(8)')"])
def test_traced_by_the_compiler_it_is_the_same_in_one_graph(word):
    model, x = tiny(layers=word), tokens(2, 200)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text, message", [
    ("locl(3)", "unknown 'locl': did you mean 'local'?"), ("local", "cannot read 'local'"), ("local()", "write local(window) with whole numbers"), ("local(3", "cannot read 'local(3'"),
    ("local(0)", "window=0 must be a whole number, at least 1"), ("local(2.5)", "window=2.5 must be a whole number"), ("local(window=-2)", "window=-2"), ("local(True)", "window=True"),
    ("local(widow=3)", "unknown 'widow': did you mean 'window'?"), ("fixed(4, 5)", "summary=5 must be at most size=4"), ("fixed(1, 2, 3)", "write fixed(size, summary=1)"),
    ("random_blocks(1, 8, seed=-1)", "seed=-1 must be a whole number, at least 0"), ("local(3) + first(2)", "cannot read 'local(3) + first(2)'"), ("", "cannot read ''"),
    ("local(3) | (first(2) / first(3))", "cannot read"), ("__import__('os')", "unknown '__import__'"), ("local(__import__('os'))", "whole numbers"), ("local(3) / local(4) / local(5)", "3 patterns"),
    ("local(**{})", "cannot read"), ("local(3).see", "cannot read")])
def test_a_wrong_pattern_is_one_line_that_says_what_would_be_right(text, message):
    with pytest.raises(ValueError) as e:
        tiny(layers=f'sparse(pattern="{text}")')
    assert message in str(e.value) and "\n" not in str(e.value) and str(e.value).startswith("layers: sparse: ")


def test_seed_0_and_brackets_and_spaces_are_fine():
    assert parse(" ( first(2) | local( 3 ) )  & full()/random_blocks(1,8,seed=0)").bound()[0] == 2
    assert GPTConfig(layers="sparse(pattern='first(2) | local(3)')*2 attention").layers


# pictures

def test_pictures_are_the_tables():
    text = picture(parse("local(2) / first(1)"), 3, heads=2)
    assert text == "#..   #..\n##.   #..\n.##   #.."


def test_the_command_draws_text_and_says_what_a_png_needs(tmp_path):
    run = lambda *a: subprocess.run([sys.executable, "-m", "tools.patterns", *a], capture_output=True, text=True, cwd=ROOT, timeout=90)
    out = run("--pattern=fixed(4)", "--T=16")
    assert out.stdout == f"fixed(4)\n{FIXED.strip()}\n"
    wrong = run("--pattern=fixd(4)")
    assert wrong.returncode == 2 and wrong.stderr == "error: pattern: unknown 'fixd': did you mean 'fixed'?\n"
    path = tmp_path / "patterns.png"
    png = run(f"--png={path}")
    if importlib.util.find_spec("matplotlib"):
        assert png.returncode == 0 and path.read_bytes()[:4] == b"\x89PNG"
    else:
        assert png.returncode == 2 and "pip install matplotlib" in png.stderr and png.stderr.count("\n") == 1


def test_the_pictures_in_the_docs_are_what_is_drawn(capsys):
    from tools.patterns import PatternsConfig, main
    main(PatternsConfig(T=16))
    drawn = capsys.readouterr().out
    shown = (ROOT / "docs/patterns.md").read_text(encoding="utf-8").split("```\n")[1::2]
    assert "\n".join(shown) == drawn


def test_one_picture_of_each_kind_by_default(capsys):
    from tools.patterns import SHOWN, PatternsConfig, main
    main(PatternsConfig(T=8))
    shown = capsys.readouterr().out
    assert all(text in shown for text in SHOWN) and plan(parse("local(4)").terms()[0], 8).M == 8
