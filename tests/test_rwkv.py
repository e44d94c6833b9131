"""RWKV-6 and RWKV-7: the recurrence of 7 against its loop and flash-linear-attention's naive form, whole models against the PyPI package
`rwkv`, and what a stack of them hands on."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens

from mixers import build
from model import GPT, GPTConfig
from ops import rwkv7 as module
from ops.positions import Positions
from ops.rwkv7 import rwkv7

CPU = torch.device("cpu")
# documents that go on from the state, begin, end in padding, and are all padding: 75 tokens a row
PACKED = torch.stack([torch.arange(9, 84), torch.cat([torch.arange(3, 23), torch.arange(1), torch.arange(33), torch.arange(21)]),
                      torch.cat([torch.full((40,), -1), torch.arange(35)]), torch.cat([torch.full((7,), -1), torch.arange(4, 60), torch.full((12,), -1)]),
                      torch.full((75,), -1)])
SHAPES = {"chunks of 32": 75, "one chunk": 32, "less": 11, "two tokens": 2}


def drawn(T, K=6, V=5, strongest=0.6065, dtype=torch.float64, B=5):
    """r, log_w, k, v, a, b of 3 heads and a state, as a trained mixer could make them; log_w down to -strongest."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    kappa, rate = F.normalize(draw(B, 3, T, K), dim=-1), draw(B, 3, T, K).sigmoid()
    out = [draw(B, 3, T, K), -strongest * (2 * draw(B, 3, T, K) - 1).sigmoid(), draw(B, 3, T, K), draw(B, 3, T, V), -kappa, kappa * rate, draw(B, 3, K, V)]
    return [t.to(dtype).requires_grad_() for t in out]


def results(x, at, run=rwkv7, **kw):
    """y, the last state and all gradients; padding's y, which means nothing, left out."""
    y, h = run(*x[:6], at, x[6], **kw)
    y = y * (at.pos >= 0)[:, None, :, None]
    g = torch.Generator().manual_seed(1)
    loss = sum((t * torch.randn(t.shape, generator=g, dtype=torch.float64).to(t.dtype)).sum() for t in (y, h))
    return [y, h, *torch.autograd.grad(loss, x)]


@pytest.mark.parametrize("strongest", [0.6065, 50.0])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("T", SHAPES.values(), ids=SHAPES)
def test_chunks_equal_the_loop(T, packed, strongest, monkeypatch):
    monkeypatch.setattr(module, "GROUP", 5 * 3 * 32)                             # a chunk at a time goes through checkpoints
    at = Positions(5, T, CPU, PACKED[:, :T] if packed else None, torch.full((5,), 9), 9)
    x = drawn(T, strongest=strongest)
    for got, want in zip(results(x, at), results(x, at, backend="naive")):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    x = [t.detach().float().requires_grad_() for t in x]
    for got, want in zip(results(x, at), results(x, at, backend="naive")):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * max(1, want.abs().max().item()))


def test_decays_of_all_kinds_give_finite_gradients():
    x, at = drawn(70, dtype=torch.float32), Positions(5, 70, CPU)
    with torch.no_grad():
        x[1][:, 0], x[1][:, 1], x[1][:, 2, ::3] = 0, -1e4, -1e4                   # never, at once, now and then
    got, want = results(x, at), results(x, at, backend="naive")
    assert all(t.isfinite().all() for t in got)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_padding_and_a_document_leave_the_state_as_they_should():
    x = drawn(75)
    h = rwkv7(*x[:6], Positions(5, 75, CPU, PACKED), x[6])[1]
    assert torch.equal(h[4], x[6][4])
    alone = [t[2:3, :, 40:] for t in x[:6]]
    torch.testing.assert_close(h[2:3], rwkv7(*alone, Positions(1, 35, CPU))[1])


def test_gradients_by_differences():
    x = [t[:1, :1].detach().requires_grad_() for t in drawn(5, 3, 2)]
    assert torch.autograd.gradcheck(lambda *x: rwkv7(*x[:6], Positions(1, 5, CPU), x[6]), x)


def test_memory_goes_with_the_tokens_and_not_with_the_states():
    """What a backward pass finds: the inputs, y, and little else (a state is 64 times a token's numbers)."""
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t) is None or t, lambda t: t):
        rwkv7(*drawn(4096, 64, 64, dtype=torch.float32, B=1)[:6], Positions(1, 4096, CPU))
    assert sum(t.untyped_storage().nbytes() for t in kept.values()) < 2.5 * 6 * 3 * 4096 * 64 * 4


# flash-linear-attention

def naive(file: str, name: str):
    """One function of fla/ops/: the package itself wants Triton."""
    pytest.importorskip("einops")
    spec = importlib.util.find_spec("fla")
    if spec is None:
        pytest.skip("pip install --no-deps fla-core")
    spec = importlib.util.spec_from_file_location("fla_" + name, f"{spec.submodule_search_locations[0]}/ops/{file}.py")
    out = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(out)
    return getattr(out, name)


@pytest.mark.slow
def test_equals_flash_linear_attentions_naive_form():
    theirs = naive("generalized_delta_rule/dplr/naive", "dplr_recurrence")
    x, at = drawn(75, dtype=torch.float32), Positions(5, 75, CPU)
    want = results(x, at, lambda r, w, k, v, a, b, at, h: theirs(r * r.shape[-1] ** 0.5, k, v, a, b, w, h))
    for a, b in zip(results(x, at), want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


@pytest.mark.slow
def test_the_recurrence_of_6_equals_flash_linear_attentions_naive_form():
    from ops.recurrence import recurrence
    theirs = naive("rwkv6/recurrent_naive", "naive_recurrent_rwkv6")
    r, w, k, v, _, _, h = drawn(75, dtype=torch.float32)
    u = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
    y, last = recurrence(r, k, v, w, Positions(5, 75, CPU), u, h)
    for a, b in zip((y, last), theirs(r, k, v, w, u, scale=1.0, initial_state=h, output_final_state=True)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


# the package of the models' authors

SCRIPT = """
import sys, torch
from rwkv.model import RWKV
torch.set_num_threads(1)
path = sys.argv[1]
ids = torch.load(path + ".ids").tolist()
whole, _ = RWKV(model=path, strategy="cpu fp32").forward(ids, None, full_output=True)
torch.save(whole.float(), path + ".out")
"""
SIZE = dict(vocab_size=65, n_layer=3, n_head=2, n_embd=32, block_size=128, position="none", norm="layernorm", bias=True, tie_embeddings=False)


def theirs(model: GPT, version: int, emb: torch.Tensor, ln0: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our weights under the names of their checkpoints."""
    out = {"emb.weight": emb, "head.weight": model.head.weight, "ln_out.weight": model.norm.weight, "ln_out.bias": model.norm.bias}
    out |= {"blocks.0.ln0.weight": ln0[0], "blocks.0.ln0.bias": ln0[1]}
    for i, block in enumerate(model.blocks):
        b, m, c = f"blocks.{i}.", block.mixer, block.mlp
        out |= {f"{b}ln{n}.{part}": getattr(norm, part) for n, norm in ((1, block.norm1), (2, block.norm2)) for part in ("weight", "bias")}
        out |= {f"{b}att.ln_x.{part}": getattr(m.norm, part) for part in ("weight", "bias")}
        names = {"receptance": m.r, "key": m.k, "value": m.v, "output": m.out} | ({"gate": m.gate} if version == 6 else {})
        out |= {f"{b}att.{name}.weight": linear.weight for name, linear in names.items()}
        out |= {f"{b}ffn.key.weight": c.up.weight, f"{b}ffn.value.weight": c.down.weight}
        mix = m.mix.view(6, 1, 1, -1)
        if version == 6:
            out |= {f"{b}att.time_maa_{n}": mu for n, mu in zip("xwkvrg", mix)}
            out |= {f"{b}att.time_maa_w1": m.mix_in.weight.T, f"{b}att.time_maa_w2": torch.stack([u.weight.T for u in m.mix_up])}
            out |= {f"{b}att.time_decay": m.decay_bias.view(1, 1, -1), f"{b}att.time_faaaa": m.bonus.view(m.H, m.D)}
            out |= {f"{b}att.time_decay_w1": m.decay.narrow.weight.T, f"{b}att.time_decay_w2": m.decay.wide.weight.T}
            out |= {f"{b}ffn.receptance.weight": c.gate.weight, f"{b}ffn.time_maa_k": c.mix.view(1, 1, -1), f"{b}ffn.time_maa_r": c.gate_mix.view(1, 1, -1)}
        else:
            out |= {f"{b}att.x_{n}": mu for n, mu in zip("rwkvag", mix)} | {f"{b}ffn.x_k": c.mix.view(1, 1, -1)}
            maps = {"w": (m.decay, m.decay_bias), "a": (m.rate, m.rate_bias), "g": (m.gate, None)} | ({} if m.first else {"v": (m.value, m.value_bias)})
            for n, (low, bias) in maps.items():
                out |= {f"{b}att.{n}1": low.narrow.weight.T, f"{b}att.{n}2": low.wide.weight.T} | ({} if bias is None else {f"{b}att.{n}0": bias.view(1, 1, -1)})
            out |= {f"{b}att.k_k": m.unlearn.view(1, 1, -1), f"{b}att.k_a": m.damp.view(1, 1, -1), f"{b}att.r_k": m.bonus.view(m.H, m.D)}
    return {name: t.detach().clone().contiguous() for name, t in out.items()}


@pytest.mark.parametrize("version", [6, 7])
def test_logits_equal_those_of_the_authors_package(version, tmp_path):
    """A whole model: embeddings and their norm, three blocks, logits; and ours token by token."""
    if importlib.util.find_spec("rwkv") is None:
        pytest.skip("pip install rwkv")
    model = tiny(**SIZE, layers=f"rwkv{version}", mlp=f"rwkv{version}")
    emb, ln0 = torch.randn(65, 32), [1 + 0.2 * torch.randn(32), 0.2 * torch.randn(32)]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("norm1.weight", "norm2.weight", "norm.weight")):
                p.copy_(1 + 0.2 * torch.randn_like(p))
            if isinstance(model.get_submodule(name.rpartition(".")[0]), torch.nn.Linear) and name.endswith("bias"):
                p.zero_()                                                        # they have none
        model.wte.weight.copy_(F.layer_norm(emb, (32,), *ln0))
    ids, path = tokens(1, 45), str(tmp_path / "model")
    torch.save(theirs(model, version, emb, ln0), path + ".pth")
    torch.save(ids[0], path + ".ids")
    env = {**os.environ, "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0", "PYTHONPATH": os.pathsep.join(sys.path)} | ({"RWKV_V7_ON": "1"} if version == 7 else {})
    subprocess.run([sys.executable, "-c", SCRIPT, path], env=env, check=True, capture_output=True, timeout=300)
    want = torch.load(path + ".out")
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0], want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(fed(model, ids, [1] * 45)[0], want, rtol=1e-4, atol=1e-4)
    assert want.std() > 0.3


# the stack

def test_the_first_layers_values_reach_all_later_ones_of_the_kind():
    """Whatever stands between: with the gate towards it open, the value is the first layer's alone."""
    model, x = tiny(layers="attention rwkv7 attention rwkv7|rwkv7", n_layer=4), tokens(2, 20)
    kinds = [(m.first, hasattr(m, "value")) for m in model.modules() if type(m).__name__ == "RWKV7"]
    assert kinds == [(True, False), (False, True), (False, True)]
    first, later = model.blocks[1].mixer, model.blocks[3].mixer.mixers[0]
    with torch.no_grad():
        later.value_bias.fill_(1e9)
        before = model(x)
        later.v.weight.normal_()                                                 # its own values count for nothing then
        torch.testing.assert_close(model(x), before)
        first.v.weight.mul_(2)
        assert (model(x) - before).abs().max() > 1e-3


def test_depth_says_what_layers_start_from():
    cfg = GPTConfig(vocab_size=9, n_layer=4, n_head=2, n_embd=32, layers="rwkv7 rwkv6")
    mixes = [m.mix.view(6, -1) for m in build(cfg)]
    assert not torch.equal(mixes[0], mixes[2]) and not torch.equal(mixes[1], mixes[3])
    assert all((m <= 1).all() for m in mixes)


@pytest.mark.parametrize("mlp", ["rwkv6", "rwkv7"])
@pytest.mark.parametrize("word", ["rwkv7", "attention(window=5)|rwkv6"])
def test_the_channel_mix_keeps_the_contract(word, mlp):
    """Pieces, packed and padded rows, rows permuted, on top of any mixer."""
    model, x = tiny(layers=word, mlp=mlp), tokens(3, 40)
    pos = torch.stack([torch.arange(40), torch.cat([torch.arange(17), torch.arange(1), torch.arange(22)]), torch.cat([torch.full((9,), -1), torch.arange(31)])])
    whole = model(x, pos=pos)
    torch.testing.assert_close(whole[1, 18:], model(x[1:2, 18:])[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[2, 9:], model(x[2:, 9:])[0], rtol=1e-5, atol=1e-5)
    for pieces in ([40], [1] * 40, [3, 14, 1, 1, 21]):
        torch.testing.assert_close(fed(model, x, pieces, pos=pos)[pos >= 0], whole[pos >= 0], rtol=1e-5, atol=1e-5)
    state = model.init_state(3, 40)
    model(x[:, :20], pos=pos[:, :20], state=state)
    state = state.rows(torch.tensor([2, 0]))
    torch.testing.assert_close(model(x[[2, 0], 20:], state=state), whole[[2, 0], 20:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mlp", ["rwkv6", "rwkv7"])
def test_the_channel_mix_is_its_formula(mlp):
    from mixers.channel_mix import ChannelMix
    torch.manual_seed(0)
    c, x = ChannelMix(GPTConfig(n_embd=64, n_head=1, n_layer=2, mlp=mlp), 1), torch.randn(1, 3, 64)
    y = c(x, Positions(1, 3, CPU))
    for t in range(3):
        past = x[0, t - 1] if t else torch.zeros(64)
        want = c.down.weight @ (c.up.weight @ (c.mix * past + (1 - c.mix) * x[0, t])).clamp(min=0) ** 2
        if mlp == "rwkv6":
            want = want * (c.gate.weight @ (c.gate_mix * past + (1 - c.gate_mix) * x[0, t])).sigmoid()
        torch.testing.assert_close(y[0, t], want, rtol=1e-5, atol=1e-6)
    assert c.up.out_features == (224 if mlp == "rwkv6" else 256)


@pytest.mark.parametrize("version", [6, 7])
def test_a_state_holds_what_is_claimed(version):
    """A layer: D x D numbers a head in float32, and an input for each half of the block, however long the text."""
    model = tiny(layers=f"rwkv{version}", mlp=f"rwkv{version}").to(torch.bfloat16)
    state = model.init_state(3, 1 << 40)
    assert sum(t.nbytes for layer in state.layers for t in layer.values()) == 2 * 3 * (4 * 8 * 8 * 4 + 2 * 32 * 2)
    assert all(layer["mixer.h"].dtype == torch.float32 for layer in state.layers)
