"""The model: its options, its start, its counts."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens
from torch.utils.flop_counter import FlopCounterMode

from config import GPTConfig, TrainConfig
from engine.log import parameter_table
from engine.optim import learning_rate, make_optimizer
from model import GPT, MLP

SHAPES = {
    "llama": dict(n_kv_head=2), "gpt2": dict(position="learned", norm="layernorm", mlp="gelu_tanh", bias=True), "alibi": dict(position="alibi", mlp="gelu"),
    "sinusoidal": dict(position="sinusoidal", mlp="relu2"), "none": dict(position="none"), "interleaved": dict(rope_layout="interleaved", rope_theta=500.0),
    "capped": dict(attn_softcap=5.0, logit_softcap=10.0), "qwen3": dict(qk_norm=True, n_kv_head=1, head_dim=16, n_inner=48),
    "mistral": dict(window=9), "streaming": dict(window=9, sinks=2, position="alibi"), "reference": dict(attention_backend="reference"),
    "flex": dict(attention_backend="flex", n_kv_head=2), "untied": dict(tie_embeddings=False),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_option_is_exact_in_pieces_with_documents_and_padding(shape):
    model, x = tiny(**SHAPES[shape]), tokens(2, 50)
    whole = model(x)
    for pieces in ([10] * 5, [1] * 50, [7, 43]):
        torch.testing.assert_close(fed(model, x, pieces), whole, rtol=1e-5, atol=1e-5)
    pos = torch.stack([torch.cat([torch.full((13,), -1), torch.arange(37)]), torch.cat([torch.arange(20), torch.arange(30)])])
    packed = model(x, pos=pos)
    torch.testing.assert_close(packed[0, 13:], model(x[:1, 13:])[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed[1, 20:], model(x[1:, 20:])[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_option_runs_in_bfloat16(shape):
    model, x = tiny(**SHAPES[shape]), tokens(2, 50)
    want, model = model(x), model.to(torch.bfloat16)
    assert (model(x) - want).abs().mean() < 0.06 * want.abs().mean()
    torch.testing.assert_close(fed(model, x, [1, 20, 29]), model(x), rtol=0.1, atol=0.1 * want.std().item())


@pytest.mark.parametrize("shape", SHAPES)
def test_every_option_matters(shape):
    """A field that is read by nobody would leave the logits as they are."""
    base, x = tiny(), tokens(2, 50)
    if shape in ("reference", "flex"):
        torch.testing.assert_close(tiny(**SHAPES[shape])(x), tiny(**{**SHAPES[shape], "attention_backend": "sdpa"})(x), rtol=1e-5, atol=1e-5)
    else:
        assert (tiny(**SHAPES[shape])(x) - base(x)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "gelu_tanh", "relu2"])
def test_feed_forwards_are_their_formulas(kind):
    mlp = MLP(GPTConfig(n_embd=8, n_head=1, mlp=kind, n_inner=12, bias=True))
    x = torch.randn(2, 3, 8)
    up, down = mlp.up, mlp.down
    h = up(x)
    want = {"swiglu": lambda: F.silu(h[..., :12]) * h[..., 12:], "gelu": lambda: h * 0.5 * (1 + torch.erf(h / 2**0.5)), "relu2": lambda: h.clamp(min=0) ** 2,
            "gelu_tanh": lambda: 0.5 * h * (1 + torch.tanh((2 / math.pi) ** 0.5 * (h + 0.044715 * h**3)))}[kind]()
    torch.testing.assert_close(mlp(x), down(want))
    assert MLP(GPTConfig(n_embd=8, n_head=1, mlp=kind)).down.in_features == 32


def test_norms_biases_and_softcap():
    rms = tiny()
    assert not [n for n, _ in rms.named_parameters() if n.endswith("bias")]
    x = torch.randn(4, 32)
    torch.testing.assert_close(rms.norm(x), x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * rms.norm.weight)
    layer = tiny(norm="layernorm", bias=True)
    torch.testing.assert_close(layer.norm(x), (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias)
    assert len([n for n, _ in layer.named_parameters() if n.endswith("bias")]) == 2 * 6 + 1
    assert tiny(logit_softcap=3.0)(tokens(2, 9)).abs().max() < 3


@pytest.mark.parametrize("shape", [dict(), dict(n_embd=128, vocab_size=65), dict(n_embd=384, n_head=6, n_layer=6, vocab_size=65), dict(SHAPES["gpt2"]), dict(vocab_size=5000, n_embd=256),
                                   dict(tie_embeddings=False), dict(layers="attention(window=7)"), dict(qk_norm=True, n_layer=8), dict(n_embd=768, n_head=12, n_layer=2, vocab_size=50304)])
def test_an_untrained_model_knows_nothing(shape):
    torch.manual_seed(0)
    cfg = GPTConfig(**{**dict(vocab_size=65, block_size=64, n_layer=4, n_head=4, n_embd=64), **shape})
    x = torch.randint(cfg.vocab_size, (4, 65))
    with torch.no_grad():
        assert abs(float(GPT(cfg)(x[:, :-1], x[:, 1:])) / math.log(cfg.vocab_size) - 1) < 0.025
        zero = GPT(GPTConfig(**{**cfg.model_fields(), "init": "zero", "tie_embeddings": False}))
        assert abs(float(zero(x[:, :-1], x[:, 1:])) / math.log(cfg.vocab_size) - 1) < 0.001
        assert all(b.mixer.out.weight.abs().sum() == 0 for b in zero.blocks if hasattr(b.mixer, "out"))


def test_the_loss_is_the_mean_over_valid_targets_in_float32():
    model, x = tiny(), tokens(2, 20)
    y = x.roll(-1, 1)
    y[0, 5:] = -1
    logits = model(x)
    want = -logits.double().log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0][y >= 0].mean()
    torch.testing.assert_close(model(x, y).double(), want, rtol=1e-6, atol=0)
    assert model.to(torch.bfloat16)(x, y).dtype == torch.float32
    assert float(model(x, torch.full_like(x, -1)).detach()) == 0


def test_dropout_is_off_in_evaluation_in_every_backend():
    """C9."""
    for backend in ("reference", "sdpa", "flex"):
        model, x = tiny(dropout=0.5, attn_dropout=0.5, attention_backend=backend), tokens(2, 20)
        assert torch.equal(model(x), model(x)) and torch.equal(model(x), tiny(attention_backend=backend)(x))
        assert not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize("move", [lambda m: m, copy.deepcopy, lambda m: m.to(torch.bfloat16), lambda m: m.double()])
def test_a_tied_head_is_the_embedding(move):
    """C7."""
    model = move(tiny())
    assert model.head.weight.data_ptr() == model.wte.weight.data_ptr()
    assert tiny(tie_embeddings=False).head.weight.data_ptr() != model.wte.weight.data_ptr()


@pytest.mark.parametrize("shape", [dict(), dict(n_kv_head=1, head_dim=16, n_inner=50), dict(position="learned", mlp="gelu", norm="layernorm", bias=True, tie_embeddings=False), dict(n_layer=3)])
def test_flops_and_parameters_are_exact(shape):
    model = tiny(attention_backend="reference", **shape)
    x = tokens(2, 24)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert counter.get_total_flops() * 3 == model.flops_per_token(24) * x.numel()
    assert sum(n for _, n in parameter_table(model)) == sum(p.numel() for p in model.parameters())
    c = model.cfg
    D, G, inner = c.head_dim or 8, c.n_kv_head or 4, model.blocks[0].mlp.down.in_features
    mats = c.n_layer * ((4 + 2 * G) * D * 32 + 4 * D * 32 + (3 if c.mlp == "swiglu" else 2) * 32 * inner) + 65 * 32
    assert model.flops_per_token(24) == 6 * mats + c.n_layer * 12 * 4 * D * 24
    assert tiny(window=7).flops_per_token(24) == tiny().flops_per_token(24) - 2 * 12 * 32 * (24 - 7)


def test_every_parameter_is_in_one_group_and_only_matrices_decay():
    """C12: with gradients of zero one step multiplies the matrices alone, once, by 1 - lr x decay."""
    for kw in (dict(tie_embeddings=True), dict(tie_embeddings=False, norm="layernorm", bias=True, qk_norm=True, position="learned")):
        model = tiny(**kw)
        optimizer = make_optimizer(model, TrainConfig(learning_rate=0.1, weight_decay=0.5))
        ids = [id(p) for g in optimizer.param_groups for p in g["params"]]
        assert len(ids) == len(set(ids)) and set(ids) == {id(p) for p in model.parameters()}
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for n, p in model.named_parameters():
            torch.testing.assert_close(p, before[n] * (0.95 if p.dim() > 1 else 1.0))


def test_the_learning_rates_course():
    """C13: above zero at the start, the highest at the end of the warm-up, min_lr at the end and after, no jump."""
    for kind in ("cosine", "linear", "wsd"):
        c = TrainConfig(learning_rate=1.0, min_lr=0.1, warmup_iters=10, lr_decay_iters=100, lr_schedule=kind)
        lr = [learning_rate(c, i) for i in range(121)]
        assert lr[0] == pytest.approx(1 / 11) and lr[9] == pytest.approx(10 / 11) and lr[10] == 1.0
        assert lr[100:] == [0.1] * 21 and all(abs(a - b) < 0.12 for a, b in zip(lr, lr[1:]))
        assert all(a >= b for a, b in zip(lr[10:], lr[11:]))
        assert lr[55] == pytest.approx({"cosine": 0.55, "linear": 0.55, "wsd": 1.0}[kind])
        if kind == "wsd":
            assert lr[80] == 1.0 and lr[90] == pytest.approx(0.55)
    assert learning_rate(TrainConfig(warmup_iters=0, max_iters=5), 0) == 1e-3
    assert learning_rate(TrainConfig(warmup_iters=0, max_iters=5), 5) == pytest.approx(1e-4)


def test_learned_positions_end_and_rotary_ones_do_not():
    """Beyond block_size: an error that says so, or longer text."""
    x = tokens(1, 80)
    with pytest.raises(ValueError, match="learned positions end at block_size=64"):
        tiny(position="learned", block_size=64)(x)
    for position in ("rope", "alibi", "sinusoidal", "none"):
        assert tiny(position=position, block_size=64)(x).shape == (1, 80, 65)
    model = tiny(position="learned", block_size=64)
    pos = torch.cat([torch.arange(40), torch.arange(40)])[None]
    torch.testing.assert_close(model(x, pos=pos)[0, 40:], model(x[:, 40:])[0], rtol=1e-5, atol=1e-5)


def test_compiled_is_eager():
    model, x = tiny(layers="attention(window=7) attention"), tokens(2, 40)
    torch.testing.assert_close(torch.compile(model)(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wrong, message", [
    (dict(n_embd=30), "n_embd=30 is no multiple of n_head=4"), (dict(n_kv_head=3), "n_head=4 is no multiple of n_kv_head=3"), (dict(head_dim=7), "head_dim must be even"),
    (dict(dropout=1.0), "dropout=1.0 must be below 1"), (dict(norm="rms"), "did you mean 'rmsnorm'?"), (dict(vocab_size=0), "needs a vocab_size"), (dict(n_layer=0), "above 0"),
    (dict(sinks=2), "needs a window"), (dict(init="zero"), "needs tie_embeddings=False"), (dict(n_layer=2.0), "n_layer=2.0 is no int"), (dict(bias="yes"), "bias='yes' is no bool"),
])
def test_wrong_settings_are_one_line(wrong, message):
    with pytest.raises(ValueError) as e:
        tiny(**wrong)
    assert message in str(e.value) and "\n" not in str(e.value)
