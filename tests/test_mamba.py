"""Mamba, Mamba-2 and their hybrids: against Hugging Face's Mamba, Jamba and Mamba2 with their weights, starts, weight decay, compilation."""

from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens

from config import GPTConfig, TrainConfig
from engine.cli import read_preset
from engine.optim import make_optimizer
from mixers.mamba import Mamba, MambaOptions
from mixers.mamba2 import Mamba2, Mamba2Options
from model import GPT
from ops.positions import Positions

CPU = torch.device("cpu")
WORDS = ["mamba", "mamba(norms=True)", "mamba2(n_groups=1)", "mamba2(n_groups=2)"]
T = 75


def rows(*lengths):
    """Positions of documents of these lengths; a negative one is padding."""
    return torch.cat([torch.full((-n,), -1) if n < 0 else torch.arange(n) for n in lengths])


PACKED = torch.stack([rows(75), rows(-20, 55), rows(64, -11), rows(20, 1, 54)])


def near(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.detach().abs().max()))


def loud(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.4)
    return module


# Hugging Face

def theirs(word):
    transformers = pytest.importorskip("transformers")
    from transformers.models.jamba.modeling_jamba import JambaMambaMixer
    from transformers.models.mamba.modeling_mamba import MambaMixer
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    if word == "mamba":
        cfg = transformers.MambaConfig(hidden_size=24, state_size=5, num_hidden_layers=1, expand=2, time_step_rank=3, use_bias=True)
        return cfg, loud(MambaMixer(cfg, 0))
    if word == "mamba(norms=True)":
        cfg = transformers.JambaConfig(hidden_size=24, mamba_d_state=5, num_hidden_layers=2, mamba_expand=2, mamba_dt_rank=3, attn_layer_offset=1,
                                       attn_layer_period=2, num_attention_heads=2, num_key_value_heads=1, mamba_proj_bias=True, rms_norm_eps=1e-5)
        return cfg, loud(JambaMambaMixer(cfg, 0))
    cfg = transformers.Mamba2Config(hidden_size=24, state_size=5, num_hidden_layers=1, expand=2, num_heads=6, head_dim=8, n_groups=int(word[-2]),
                                    chunk_size=16, use_bias=True)
    return cfg, loud(Mamba2Mixer(cfg, 0))


def ours(word):
    cfg = GPTConfig(n_embd=24, n_head=4, bias=True)
    if "mamba2" in word:
        return Mamba2(cfg, Mamba2Options(d_state=5, head_dim=8, n_groups=int(word[-2])))
    return Mamba(cfg, MambaOptions(d_state=5, dt_rank=3, norms="norms" in word))


NAMES = {"in_proj.weight": "inp.weight", "in_proj.bias": "inp.bias", "out_proj.weight": "out.weight", "out_proj.bias": "out.bias",
         "conv1d.weight": "conv", "conv1d.bias": "conv_bias", "x_proj.weight": "select.weight", "dt_proj.weight": "dt", "dt_proj.bias": "dt_bias",
         "dt_layernorm.weight": "dt_norm.weight", "b_layernorm.weight": "B_norm.weight", "c_layernorm.weight": "C_norm.weight"}


def under_our_names(tensors):
    """Theirs, weights or gradients; their convolution is an nn.Conv1d."""
    return {NAMES.get(n, n): t[:, 0] if n == "conv1d.weight" else t for n, t in tensors.items()}


def loss(y):
    return (y * torch.arange(y.numel()).view_as(y).sin()).sum()


@pytest.mark.parametrize("word", WORDS)
def test_outputs_gradients_and_states_are_hugging_faces(word):
    from transformers import DynamicCache
    cfg, their = theirs(word)
    mixer = ours(word)
    mixer.load_state_dict(under_our_names(their.state_dict()))
    x = torch.randn(3, T, 24, generator=torch.Generator().manual_seed(1))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, got = their(a), mixer(b, Positions(3, T, CPU))
    assert want.std() > 0.3
    near(got, want)
    loss(want).backward()
    loss(got).backward()
    grads = under_our_names({n: p.grad for n, p in their.named_parameters()})
    assert set(grads) == {n for n, _ in mixer.named_parameters()}
    for grad, right in [(b.grad, a.grad), *((p.grad, grads[n]) for n, p in mixer.named_parameters())]:
        near(grad, right)
    cache, state, got = DynamicCache(config=cfg), mixer.init_state(3, T, torch.float32, CPU), []
    with torch.no_grad():
        their(x, cache=cache)
        for i, n in ((0, 40), (40, 1), (41, 34)):
            got.append(mixer(x[:, i:i + n], Positions(3, n, CPU, length=torch.full((3,), i), past=i), state))
    near(torch.cat(got, 1), want.detach())
    near(state["h"].mT, cache.get_recurrent_state(0, state_idx=0))
    near(state["conv"].mT, cache.get_conv_state(0, state_idx=0)[..., 1:])


@pytest.mark.parametrize("word", WORDS)
def test_padded_and_packed_rows_are_hugging_faces_alone(word):
    """A document at a time through theirs: outputs, and gradients of the input."""
    _, their = theirs(word)
    mixer = ours(word)
    mixer.load_state_dict(under_our_names(their.state_dict()))
    x = torch.randn(4, T, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
    got = mixer(x, Positions(4, T, CPU, PACKED))
    grad, = torch.autograd.grad(loss(got * (PACKED >= 0)[..., None]), x)
    weight = torch.arange(got.numel()).view_as(got).sin()
    for row, a, b in [(0, 0, 75), (1, 20, 75), (2, 0, 64), (3, 0, 20), (3, 20, 21), (3, 21, 75)]:
        one = x[row:row + 1, a:b].detach().requires_grad_()
        want = their(one)
        near(got[row:row + 1, a:b], want)
        (want * weight[row:row + 1, a:b]).sum().backward()
        near(grad[row:row + 1, a:b], one.grad)
    assert (grad[PACKED < 0] == 0).all()


def test_a_hybrid_has_the_logits_of_hugging_faces_jamba():
    transformers = pytest.importorskip("transformers")
    cfg = transformers.JambaConfig(vocab_size=65, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                                   attn_layer_offset=2, attn_layer_period=4, num_experts=1, mamba_d_state=5, mamba_dt_rank=3, rms_norm_eps=1e-5,
                                   tie_word_embeddings=False, attn_implementation="eager", pad_token_id=None)
    their = loud(transformers.JambaForCausalLM(cfg)).eval()
    model = tiny(layers="mamba(norms=True, d_state=5, dt_rank=3)*2 attention mamba(norms=True, d_state=5, dt_rank=3)", n_layer=4, n_kv_head=2, n_inner=48,
                 position="none", tie_embeddings=False)
    w = their.state_dict()
    new = {"wte.weight": w["model.embed_tokens.weight"], "norm.weight": w["model.final_layernorm.weight"], "head.weight": w["lm_head.weight"]}
    for i in range(4):
        layer = {n.removeprefix(f"model.layers.{i}."): t for n, t in w.items() if n.startswith(f"model.layers.{i}.")}
        new |= {f"blocks.{i}.norm1.weight": layer["input_layernorm.weight"], f"blocks.{i}.norm2.weight": layer["pre_ff_layernorm.weight"],
                f"blocks.{i}.mlp.up.weight": torch.cat([layer["feed_forward.gate_proj.weight"], layer["feed_forward.up_proj.weight"]]),
                f"blocks.{i}.mlp.down.weight": layer["feed_forward.down_proj.weight"]}
        if i == 2:
            new |= {f"blocks.{i}.mixer.qkv.weight": torch.cat([layer[f"self_attn.{n}_proj.weight"] for n in "qkv"]),
                    f"blocks.{i}.mixer.out.weight": layer["self_attn.o_proj.weight"]}
        else:
            mixer = under_our_names({n.removeprefix("mamba."): t for n, t in layer.items() if n.startswith("mamba.")})
            new |= {f"blocks.{i}.mixer.{n}": t for n, t in mixer.items()}
    model.load_state_dict(new)
    x = tokens(2, 50)
    with torch.no_grad():
        want = their(x).logits
        assert want.std() > 0.3
        for got in (model(x), fed(model, x, [20, 1, 1, 28])):
            near(got, want)


# what they start from, and what becomes of it

def test_mamba_starts_as_the_paper_says():
    model = tiny_untouched("mamba", n_embd=512)
    m = model.blocks[0].mixer
    assert (m.E, m.N, m.K, m.R) == (1024, 16, 4, 32)
    torch.testing.assert_close(-m.A_log.exp(), -torch.arange(1.0, 17).expand(1024, 16))
    steps = F.softplus(m.dt_bias.detach())
    assert 1e-3 * 0.999 < steps.min() < 1.2e-3 and 0.085 < steps.max() < 0.1001 and abs(steps.log().mean() - torch.tensor(1e-2).log()) < 0.15
    assert (m.D == 1).all() and m.dt.abs().max() <= 32**-0.5 and m.dt.std() > 0.5 * 32**-0.5 and m.conv.abs().max() <= 0.5
    assert Mamba(GPTConfig(n_embd=40, n_head=1), MambaOptions()).R == 3


def test_mamba2_starts_as_the_paper_says():
    m = tiny_untouched("mamba2", n_embd=2048).blocks[0].mixer
    assert (m.E, m.H, m.P, m.N, m.G, m.K) == (4096, 64, 64, 128, 1, 4)
    A, steps = m.A_log.exp(), F.softplus(m.dt_bias.detach())
    assert 1 <= A.min() < 2 and 15 < A.max() <= 16 and (m.D == 1).all()
    assert 1e-3 * 0.999 < steps.min() < 2e-3 and 0.05 < steps.max() < 0.1001


def tiny_untouched(word, **kw):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**dict(vocab_size=65, n_layer=1, n_head=4, layers=word), **kw}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("word", ["mamba(norms=True)", "mamba2"])
def test_rates_skips_and_steps_do_not_decay(word, optimizer):
    model = tiny_untouched(word, n_embd=64)
    groups = make_optimizer(model, TrainConfig(optimizer=optimizer, weight_decay=0.1)).param_groups
    decays = {id(p): g["weight_decay"] > 0 for g in groups for p in g["params"]}
    for name, p in model.named_parameters():
        matrix = p.dim() >= 2 and "A_log" not in name
        assert decays[id(p)] == matrix, name


@pytest.mark.parametrize("word, numbers", [("mamba", 3 * 64 + 16 * 64), ("mamba2", 3 * (64 + 2 * 128) + 64 * 128), ("mamba2(n_groups=4, head_dim=8, d_state=5)", 3 * (64 + 40) + 64 * 5)])
def test_the_state_does_not_grow_and_the_recurrent_part_is_float32(word, numbers):
    model = tiny(layers=word, n_layer=1)
    for max_len in (10, 100000):
        state = model.init_state(2, max_len, torch.bfloat16).layers[0]
        assert sum(t.numel() for t in state.values()) == 2 * numbers
        assert state["h"].dtype == torch.float32 and state["conv"].dtype == torch.bfloat16


@pytest.mark.parametrize("layers, message", [
    ("mamba(d_state=0)", "d_state=0 must be above 0"), ("mamba(dt_rnk=3)", "did you mean 'dt_rank'?"), ("mamba(norms=1)", "norms=1 is no bool"),
    ("mamba2(head_dim=24)", "64 channels (expand times n_embd) are no multiple of head_dim=24"), ("mamba3", "did you mean 'mamba"),
    ("mamba2(head_dim=16, n_groups=3)", "4 heads (of 16 of 64 channels) are no multiple of n_groups=3"),
])
def test_wrong_options_are_one_line(layers, message):
    with pytest.raises(ValueError) as e:
        tiny(layers=layers)
    assert message in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("preset, layers", [
    ("mamba", [["Mamba"]] * 6), ("mamba2", [["Mamba2"]] * 6), ("jamba", [["Mamba"]] * 4 + [["Attention"]] + [["Mamba"]] * 3),
    ("samba", [["Mamba"], ["Attention"]] * 3), ("parallel", [["Mamba2", "Attention"]] * 6),
])
def test_presets_are_what_they_say_and_learn(preset, layers):
    cfg = parse_preset(preset)
    small = dict(vocab_size=65, n_embd=64, block_size=64)
    model = tiny_untouched(cfg["layers"].replace("d_state=64", "d_state=16"), **{k: cfg[k] for k in ("n_layer", "position", "norm", "mlp", "qk_norm")}, **small)
    words = [[type(m).__name__ for m in getattr(b.mixer, "mixers", [b.mixer])] for b in model.blocks]
    assert words == layers
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", learning_rate=3e-3))
    x = tokens(1, 64).repeat(2, 1)
    first = model(x[:, :-1], x[:, 1:]).item()
    for _ in range(8):
        optimizer.zero_grad()
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
    assert model(x[:, :-1], x[:, 1:]).item() < 0.8 * first


def parse_preset(name):
    preset = read_preset(f"config/mixers/{name}.py", get_type_hints(TrainConfig))
    return {f.name: preset.get(f.name, f.default) for f in fields(TrainConfig)}
