"""Weights in fewer bits: rounded as they say, and the kernel computes what torch does from the same codes."""

import pytest
import torch
from conftest import tiny, tokens
from torch import nn

from engine.decode import for_generation
from mixers import MIXERS
from ops import few_rows
from ops.few_rows import FewRows, kernel
from ops.positions import Positions
from ops.processor import processor

needs_compiler = pytest.mark.skipif(kernel() is None, reason="no C++20 compiler or ninja here")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("K, N", [(32, 5), (96, 64), (768, 130)])
def test_the_kernel_is_the_product(K, N, bits, dtype, monkeypatch):
    torch.manual_seed(0)
    layer = nn.Linear(K, N).to(dtype)
    made = FewRows(layer, bits)
    exact = lambda x: nn.functional.linear(x.double(), made.weight_as(torch.float64), layer.bias.double())
    calls, run = [], torch.ops.heed.few_rows
    monkeypatch.setattr(torch.ops.heed, "few_rows", lambda *a: calls.append(1) or run(*a))
    native = "avx512_bf16" in processor() and "avx512_vnni" in processor()        # then int8's kernel takes x in 16 bits
    off = 2e-2 if dtype == torch.bfloat16 else 1e-4 if bits == 8 and native else 1e-5
    for shape in ((1, 1), (2, 1), (1, 3), (4, 1), (5, 1), (2, 4), (7,), (9, 1), (16, 1)):
        x = torch.randn(*shape, K, dtype=dtype)
        got = made(x)
        assert calls.pop() and got.dtype == dtype and got.shape == (*shape, N)
        torch.testing.assert_close(got.double(), exact(x), rtol=off, atol=off)
    x = torch.randn(3, 20, K, dtype=dtype)[:, ::2]                   # more rows: torch, with the same weights
    torch.testing.assert_close(made(x).double(), exact(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=5e-2 if dtype == torch.bfloat16 else 1e-5)
    assert made(torch.randn(0, K, dtype=dtype)).shape == (0, N)


@pytest.mark.parametrize("bits, step", [(8, 1 / 127), (4, 1 / 15)])
def test_weights_are_off_by_half_a_step(bits, step):
    torch.manual_seed(0)
    layer = nn.Linear(64, 40, bias=False)
    layer.weight.data[3] *= 100
    layer.weight.data[5] = 0
    made = FewRows(layer, bits)
    w = layer.weight if bits == 8 else layer.weight.unflatten(1, (-1, 32))
    span = w.abs().amax(-1, keepdim=True) if bits == 8 else w.amax(-1, keepdim=True) - w.amin(-1, keepdim=True)
    off = (made.weight - layer.weight).abs().view_as(w)
    assert (off <= 0.51 * step * span + 1e-3 * w.abs().amax(-1, keepdim=True) + 1e-12).all() and (off.amax() > 0.3 * step * span.amax())
    assert sum(t.numel() * t.element_size() for t in made.buffers()) == {8: 40 * 64 + 4 * 40, 4: 40 * 64 * 5 // 8}[bits]


def test_without_a_compiler_it_goes_on(monkeypatch, capsys):
    import torch.utils.cpp_extension as extension
    monkeypatch.setattr(extension, "load", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("x\nerror: no compiler\ny")))
    few_rows.kernel.cache_clear()
    monkeypatch.setattr(few_rows, "BUILT", [])
    try:
        layer, x = nn.Linear(32, 8), torch.randn(1, 32)
        made = FewRows(layer, 8)
        torch.testing.assert_close(made(x), nn.functional.linear(x, made.weight, layer.bias))
        assert capsys.readouterr().err.startswith("no fast kernel for few rows (error: no compiler)")
    finally:
        few_rows.kernel.cache_clear()


@torch.no_grad()
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("word", MIXERS)
def test_every_mixer_runs_on_rounded_weights(word, bits):
    """Prefill by torch and decoding by the kernel agree; and 8 bits stay near the model."""
    model, x = tiny(layers=word, n_embd=64), tokens(2, 20)
    whole = model(x)
    assert for_generation(model, bits) > 0.9
    rounded, state = model(x), model.init_state(2, 32)
    got = torch.cat([model(x[:, :12], state=state), *[model(x[:, i:i + 1], state=state) for i in range(12, 20)]], 1)
    torch.testing.assert_close(got, rounded, rtol=1e-3, atol=1e-3 * float(rounded.abs().max()))
    if bits == 8:
        assert (rounded - whole).norm() < 0.1 * whole.norm()


def test_a_tied_embedding_keeps_its_matrix():
    model = tiny()
    before = model.wte.weight.clone()
    for_generation(model, 8)
    assert torch.equal(model.wte.weight, before) and model.head.codes.dtype == torch.int8 and not any(isinstance(m, nn.Linear) for m in model.modules())


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("B, H, G, S", [(1, 4, 4, 1), (3, 6, 2, 37), (2, 4, 1, 300)])
def test_one_query_is_attention(B, H, G, S, dtype):
    torch.manual_seed(0)
    q, cache = torch.randn(B, H, 1, 32, dtype=dtype), torch.randn(2, B, G, S + 5, 32, dtype=dtype)
    k, v = cache[:, :, :, :S]
    seen = torch.rand(B, 1, 1, S) < 0.5
    seen[..., 0] = True
    for mask in (None, seen, torch.randn(1, H, 1, S).to(dtype), torch.randn(B, H, 1, S).masked_fill(~seen, -torch.inf).to(dtype)):
        want = nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True, scale=0.3,
                                                          attn_mask=mask.double() if mask is not None and mask.dtype != torch.bool else mask)
        got = few_rows.one_query(q, k, v, mask, 0.3)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5 if dtype == torch.float32 else 1e-2)
    assert few_rows.one_query(q.repeat(1, 1, 2, 1), k, v, None, None) is None and few_rows.one_query(q[..., :8], k[..., :8], v[..., :8], None, None) is None


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("cfg", [dict(), dict(n_kv_head=2, layers="attention(window=7, sinks=2) attention(sink_logit=True)"), dict(position="alibi"),
                                 dict(layers="sparse(pattern='strided(5)') forgetting")], ids=str)
def test_decoding_by_the_kernel_is_the_forward_pass(cfg, monkeypatch):
    model, x, calls = tiny(n_embd=64, **cfg), tokens(3, 40), []
    want, run = model(x), few_rows.one_query
    monkeypatch.setattr("ops.attend.one_query", lambda *a: calls.append(y := run(*a)) or y)
    state = model.init_state(3, 64)
    pos = torch.arange(40).expand(3, 40).clone()
    pos[1, 30:] -= 30
    got = torch.cat([model(x[:, i:i + 1], pos=None if i < 30 else pos[:, i:i + 1], state=state) for i in range(40)], 1)
    torch.testing.assert_close(got[[0, 2]], want[[0, 2]], rtol=1e-4, atol=2e-5)
    assert sum(y is not None for y in calls) >= 40


@needs_compiler
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cfg", [dict(), dict(position="learned", norm="layernorm", bias=True, mlp="gelu_tanh"), dict(n_kv_head=2, qk_norm=True, mlp="gelu"),
                                 dict(rope_layout="interleaved", layers="attention(rotary=8)", mlp="relu2"), dict(layers="attention(window=7, sinks=2) attention"),
                                 dict(rope_scaling="yarn(factor=4, original=16)", head_dim=32)], ids=str)
def test_a_block_in_two_calls_is_the_block(cfg, dtype, monkeypatch):
    """Rows of unequal lengths, a token at a time."""
    model, x = tiny(n_embd=64, **cfg).to(dtype), tokens(3, 40)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            p.copy_(1 + 0.3 * torch.randn_like(p))
    short = torch.where(torch.arange(20)[None] < torch.tensor([20, 13, 5])[:, None], torch.arange(20)[None], -1)

    def decoded():
        state = model.init_state(3, 64)
        model(x[:, :20], pos=short, state=state)
        return torch.cat([model(x[:, i:i + 1], state=state) for i in range(20, 40)], 1)

    want = decoded()
    for_generation(model)
    calls = {"mlp": 0, "attention": 0}
    for name in calls:
        run = getattr(torch.ops.heed, name)
        monkeypatch.setattr(torch.ops.heed, name, lambda *a, name=name, run=run: calls.update({name: calls[name] + 1}) or run(*a))
    got = decoded()
    assert calls == {"mlp": 20 * model.cfg.n_layer, "attention": 20 * model.cfg.n_layer}
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    else:
        assert (got - want).norm() < 0.02 * want.norm()
    with torch.enable_grad():                                       # gradients go another way
        model(x).sum().backward()
    assert model.wte.weight.grad is not None


@needs_compiler
@torch.no_grad()
def test_what_the_kernel_does_not_do_goes_the_long_way(monkeypatch):
    for cfg in (dict(position="alibi"), dict(attn_softcap=5.0), dict(layers="attention(gate=True)"), dict(layers="attention(sink_logit=True)"), dict(kv_cache="int8")):
        model, x = tiny(n_embd=64, **cfg), tokens(2, 12)
        want, state = model(x), model.init_state(2, 16)
        for_generation(model)
        monkeypatch.setattr(torch.ops.heed, "attention", None)
        got = torch.cat([model(x[:, i:i + 1], state=state) for i in range(12)], 1)
        torch.testing.assert_close(got, want, rtol=1e-4 if "kv_cache" not in cfg else 0.1, atol=1e-3)
        monkeypatch.undo()


@needs_compiler
def test_what_cannot_be_is_not_hidden(monkeypatch):
    x = torch.randn(1, 64)
    x[0, 3] = torch.nan
    with torch.no_grad():
        assert FewRows(nn.Linear(64, 32), 8)(x).isnan().all()
    made, x = FewRows(nn.Linear(64, 32), None), torch.randn(1, 64, requires_grad=True)
    made(x).sum().backward()                                         # the kernel has no gradient: torch's way
    torch.testing.assert_close(x.grad[0], made.weight.sum(0))
    model, x = tiny(n_embd=64), tokens(1, 5)
    for_generation(model)
    with torch.no_grad():
        want = model(x[:, :1], state=model.init_state(1, 8))
        for_generation(model)                                        # once more changes nothing
        assert torch.equal(model(x[:, :1], state=model.init_state(1, 8)), want)
        monkeypatch.setattr(Positions, "slot", lambda *a: torch.tensor([[9]]))
        with pytest.raises(IndexError, match="slot 9 of 9"):
            model(x[:, :1], state=model.init_state(1, 8))
