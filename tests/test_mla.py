"""Multi-head latent attention: against the formula head by head, against Hugging Face's DeepSeek-V3, expanded against absorbed."""

import math

import pytest
import torch
from conftest import fed, tiny, tokens

from config import GPTConfig
from mixers.attention import Attention, AttentionOptions
from mixers.mla import MLA, MLAOptions
from ops.positions import Positions

CPU = torch.device("cpu")
WIDTHS = dict(kv_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14)
PACKED = torch.tensor([[*range(20), *range(30)], [-1] * 4 + [*range(46)], [*range(41)] + [-1] * 9])
close = dict(rtol=1e-5, atol=1e-5)


def loud(options: MLAOptions, **kw) -> MLA:
    torch.manual_seed(0)
    mixer = MLA(GPTConfig(**{**dict(n_embd=48, n_head=4, norm_eps=1e-6), **kw}), options)
    with torch.no_grad():
        for name, p in mixer.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.2)
    return mixer


def literal(m: MLA, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
    """The paper's equations 37 to 47, a head and a query at a time; x (T, C), pos (T,)."""
    def rms(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    def rope(x):                                            # (T, rot): pairs (i, i + rot/2) as complex numbers
        if not m.turn:
            return x
        a, b = (x[:, 0::2], x[:, 1::2]) if m.cfg.rope_layout == "interleaved" else x.chunk(2, -1)
        turn = pos[:, None] * m.cfg.rope_theta ** (-torch.arange(0, m.rot, 2) / m.rot)
        z = torch.complex(a, b) * torch.polar(torch.ones_like(turn), turn)
        return torch.cat([z.real, z.imag], -1)              # the order of channels is no matter to a scalar product

    T = len(x)
    ckr = m.kv_down(x)
    c, k_rot = rms(ckr[:, :m.rank], m.kv_norm), rope(ckr[:, m.rank:])
    cq = rms(m.q_down(x), m.q_norm) if m.q_rank else x
    heads = []
    for h in range(m.H):
        W_Q, W_K, W_V = (w.view(m.H, -1, w.shape[1])[h] for w in (m.q_up.weight, m.k_up.weight, m.v_up.weight))
        q, k, v = cq @ W_Q.T, c @ W_K.T, c @ W_V.T
        q, k = torch.cat([q[:, :m.nope], rope(q[:, m.nope:])], -1), torch.cat([k, k_rot], -1)
        rows = []
        for t in range(T):
            start = t - int(pos[t])
            seen = [j for j in range(start, t + 1) if not m.window or t - j < m.window or j - start < m.sinks]
            s = k[seen] @ q[t] / math.sqrt(m.nope + m.rot)
            s = m.cfg.attn_softcap * torch.tanh(s / m.cfg.attn_softcap) if m.cfg.attn_softcap else s
            rows.append(s.softmax(0) @ v[seen])
        heads.append(torch.stack(rows))
    return m.out(torch.cat(heads, -1))


def numbers(m: MLA, form: str, x: torch.Tensor, pos: torch.Tensor | None) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters; padding counts for nothing."""
    m.zero_grad()
    x = x.clone().requires_grad_()
    where = torch.arange(x.shape[1]).expand(x.shape[:2]) if pos is None else pos
    if form == "literal":
        y = torch.zeros_like(x)
        for b in range(len(x)):
            real = (where[b] >= 0).nonzero()[:, 0]
            y = y.index_put((torch.tensor(b), real), literal(m, x[b, real], where[b, real]))
    else:
        at = Positions(*x.shape[:2], CPU, pos)
        q, kv = m.queries_and_latents(x, at)
        y = m.out(getattr(m, form)(q, kv, at).transpose(1, 2).flatten(2)) * (where >= 0)[..., None]
    (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in m.parameters())]


CASES = {
    "full queries": (WIDTHS, {}), "query latent": (dict(**WIDTHS, q_lora_rank=18), {}), "interleaved": (WIDTHS, dict(rope_layout="interleaved")),
    "no rope": (dict(**WIDTHS, rope=False), {}), "window": (dict(**WIDTHS, window=7), {}), "sinks": (dict(**WIDTHS, window=7, sinks=2), {}),
    "softcap": (WIDTHS, dict(attn_softcap=2.0)), "bias": (WIDTHS, dict(bias=True)), "wide values": (WIDTHS | dict(v_head_dim=23), {}), "defaults": ({}, {}),
}


@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_both_forms_are_the_paper_s_formula_forward_and_backward(case, pos):
    options, kw = CASES[case]
    m, x = loud(MLAOptions(**options), **kw), torch.randn(3, 50, 48, generator=torch.Generator().manual_seed(1))
    want = numbers(m, "literal", x, pos)
    assert want[0].std() > 0.3
    for form in ("expanded", "absorbed"):
        for a, b in zip(numbers(m, form, x, pos), want):
            assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max()), form


def test_the_default_widths_are_the_paper_s():
    """DeepSeek-V2: 128 heads of 128, a latent of 512, 64 rotary channels; 170 is r (nope + V) / (2 r - nope - V)."""
    m = MLA(GPTConfig(n_embd=5120, n_head=4, head_dim=128), MLAOptions())
    assert (m.rank, m.nope, m.rot, m.V, int(m.many)) == (512, 128, 64, 128, 170)
    assert not m.q_rank and MLA(GPTConfig(n_embd=64, n_head=1), MLAOptions()).rank == 64


def test_with_keys_of_its_own_width_it_is_multi_head_attention():
    """Where the latent is x itself (up to RMSNorm) and nothing is rotated, W_UK and W_UV are attention's W_K and W_V."""
    cfg = GPTConfig(n_embd=48, n_head=4, position="none")
    m, a = loud(MLAOptions(kv_lora_rank=48, qk_rope_head_dim=1), position="none"), Attention(cfg, AttentionOptions())
    with torch.no_grad():
        m.kv_norm.weight.fill_(1)
        m.kv_down.weight.copy_(torch.cat([torch.eye(48), torch.zeros(1, 48)]))
        q = m.q_up.weight.view(4, 13, 48)[:, :12].reshape(48, 48) * (12 / 13) ** 0.5    # the scale counts the rotary channel
        a.qkv.weight.copy_(torch.cat([q, m.k_up.weight, m.v_up.weight]))
        a.out.weight.copy_(m.out.weight)
    x = torch.nn.functional.rms_norm(torch.randn(2, 30, 48), (48,), eps=1e-6)
    at = Positions(2, 30, CPU)
    torch.testing.assert_close(m(x, at), a(x, at), **close)


def test_padding_gives_zero_in_both_forms():
    m, at = loud(MLAOptions(**WIDTHS)), Positions(3, 50, CPU, PACKED)
    q, kv = m.queries_and_latents(torch.randn(3, 50, 48), at)
    a, b = m.expanded(q, kv, at), m.absorbed(q, kv, at)
    torch.testing.assert_close(a, b, **close)
    assert (b.transpose(1, 2)[PACKED < 0] == 0).all()


@pytest.mark.parametrize("word", ["mla", "mla(window=11, sinks=2)", "mla(kv_lora_rank=6)"])
def test_every_switch_between_the_forms_gives_the_numbers_of_the_whole(word, monkeypatch):
    """Pieces just below, at and above the number that pays for an expansion (10 2/3 with the default widths; never with 2 r < nope + V)."""
    model, x, used = tiny(layers=word), tokens(2, 96), []
    forms = {form: getattr(MLA, form) for form in ("expanded", "absorbed")}
    for form in forms:
        monkeypatch.setattr(MLA, form, lambda self, q, *rest, form=form: used.append((form, q.shape[2])) or forms[form](self, q, *rest))
    want = model(x)
    used.clear()
    pieces = [12, 10, 11, 1, 1, 9, 20, 32]
    torch.testing.assert_close(fed(model, x, pieces), want, **close)
    absorbed = {1, 9, 10} if "rank" not in word else {1, 9, 10, 11, 20, 32}
    assert used == [("absorbed" if T in absorbed else "expanded", T) for T in pieces for _ in range(2)]


def test_a_token_leaves_its_latent_and_its_rotary_key_and_nothing_else():
    model = tiny(layers=f"mla({', '.join(f'{k}={v}' for k, v in WIDTHS.items())})", n_layer=3)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        state = model.init_state(2, 100, dtype)
        held = sum(t.numel() * t.element_size() for layer in state.layers for t in layer.values())
        assert held == 2 * 3 * (100 + 1) * (20 + 6) * size
    assert tiny(layers="mla(window=9, sinks=2)").init_state(1, 100).layers[0]["kv"].shape == (1, 2 + 9 + 1, 32 + 4)


def test_the_state_holds_normalised_latents_beside_rotated_keys():
    m, x = loud(MLAOptions(**WIDTHS)), torch.randn(1, 5, 48)
    state = m.init_state(1, 8, torch.float32, CPU)
    with torch.no_grad():
        m(x, Positions(1, 5, CPU, length=torch.zeros(1, dtype=torch.long)), state)
        c = state["kv"][0, :5, :20] / m.kv_norm.weight
        torch.testing.assert_close(c.square().mean(-1), torch.ones(5), rtol=1e-4, atol=1e-4)
        raw = m.kv_down(x)[0, :, 20:]
    k = state["kv"][0, :5, 20:]
    torch.testing.assert_close(k[0], raw[0])                 # position 0 is not turned, position 4 is, and keeps its length
    torch.testing.assert_close(k.norm(dim=-1), raw.norm(dim=-1))
    assert not torch.allclose(k[4], raw[4]) and (state["kv"][0, 5:] == 0).all()


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The largest number of elements that any operation has put into memory of its own: no view, nothing written in place."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)}
        made = [t.numel() for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in old]
        self.n = max([self.n, *made])
        return out


def test_a_decoding_step_neither_expands_nor_copies_the_past():
    m, S = loud(MLAOptions(**WIDTHS)), 1000
    state = m.init_state(1, S, torch.float32, CPU)
    with torch.no_grad(), Largest() as largest:
        m(torch.randn(1, 1, 48), Positions(1, 1, CPU, length=torch.tensor([S - 1]), past=S - 1), state)
    assert S < largest.n < S * (20 + 6)


@pytest.mark.parametrize("window, most", [(0, 4), (32, 8)])
def test_training_holds_no_square_of_scores_on_a_cpu(window, most):
    """Keys of 16 channels beside values of 14 go through the fused kernel: without padding it refuses, and all T x T scores are made."""
    m, T = loud(MLAOptions(**WIDTHS, window=window), n_head=1), 4096
    with Largest() as largest:
        m(torch.randn(1, T, 48), Positions(1, T, CPU)).sum().backward()
    assert largest.n <= most * T * 48


def test_backends_agree():
    x = tokens(2, 70)
    for kw in ({}, dict(window=9)):
        want = tiny(layers="mla", attention_backend="reference", **kw)(x)
        for backend in ("sdpa", "flex"):
            with torch.no_grad():
                torch.testing.assert_close(tiny(layers="mla", attention_backend=backend, **kw)(x), want, **close)


@pytest.mark.parametrize("layers, message", [
    ("mla(kv_lora_rank=0)", "kv_lora_rank=0 must be above 0"), ("mla(qk_rope_head_dim=3)", "turns pairs of channels, and qk_rope_head_dim=3 is odd"),
    ("mla(sinks=2)", "needs a window"), ("mla(kv_lora=3)", "did you mean 'kv_lora_rank'?"),
])
def test_wrong_options_are_one_line(layers, message):
    with pytest.raises(ValueError) as e:
        tiny(layers=layers)
    assert message in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(ValueError, match="mla has no ALiBi"):
        tiny(layers="mla", position="alibi")


def test_compiled_steps_are_eager_s():
    model, x = tiny(layers="mla"), tokens(2, 24)
    want = fed(model, x, [20, 1, 1, 1, 1])
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager")
    state = model.init_state(2, 24)
    got = [run(x[:, :20], state=state)] + [run(x[:, i:i + 1], state=state) for i in range(20, 24)]
    torch.testing.assert_close(torch.cat(got, 1), want, **close)


# Hugging Face

def theirs(q_lora_rank, interleaved, **rope):
    transformers = pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
    cfg = transformers.DeepseekV3Config(hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=q_lora_rank, **WIDTHS,
                                        rope_interleave=interleaved, attention_bias=True, attn_implementation="eager", **rope)
    torch.manual_seed(0)
    attention = DeepseekV3Attention(cfg, 0)
    with torch.no_grad():
        for name, p in attention.named_parameters():
            p.normal_(1.0 if "layernorm" in name else 0.0, 0.2)
    return attention, DeepseekV3RotaryEmbedding(cfg)


NAMES = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "out": "o_proj"}


def under_our_names(w: dict[str, torch.Tensor], q_lora_rank) -> dict[str, torch.Tensor]:
    """Theirs, weights or gradients. Their kv_b_proj has the rows of one head after another, keys before values."""
    k, v = w["kv_b_proj.weight"].view(4, 24, 20).split([10, 14], 1)
    out = {f"{a}.{part}": w[f"{b}.{part}"] for a, b in NAMES.items() for part in ("weight", "bias") if f"{b}.{part}" in w}
    return out | {"k_up.weight": k.reshape(40, 20), "v_up.weight": v.reshape(56, 20), "q_up.weight": w[f"q_{'b_' if q_lora_rank else ''}proj.weight"]}


@pytest.mark.slow
@pytest.mark.parametrize("interleaved, scaled", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("q_lora_rank", [18, None])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
def test_both_forms_equal_hugging_faces_deepseek(pos, q_lora_rank, interleaved, scaled):
    """scaled: by YaRN, with DeepSeek's own factor of all scores."""
    yarn = dict(factor=8.0, beta_fast=3.0, mscale=0.7, mscale_all_dim=1.3)
    rope = dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, original_max_position_embeddings=32, **yarn), max_position_embeddings=256)
    attention, rotary = theirs(q_lora_rank, interleaved, **(rope if scaled else {}))
    scaling = f"yarn(original=32, {', '.join(f'{k}={v}' for k, v in yarn.items())})" if scaled else "none"
    m = MLA(GPTConfig(n_embd=48, n_head=4, norm_eps=1e-6, bias=True, rope_layout="interleaved" if interleaved else "half", rope_scaling=scaling),
            MLAOptions(**WIDTHS, q_lora_rank=q_lora_rank))
    m.load_state_dict(w := under_our_names(attention.state_dict(), q_lora_rank), strict=q_lora_rank is not None)
    assert set(m.state_dict()) - set(w) == set()
    x = torch.randn(3, 50, 48, generator=torch.Generator().manual_seed(1))
    where = torch.arange(50).expand(3, 50) if pos is None else pos
    doc, real = (where == 0).cumsum(1), where >= 0
    see = (doc[:, :, None] == doc[:, None]) & (where[:, :, None] >= where[:, None]) & real[:, None]
    mask = torch.zeros(3, 1, 50, 50).masked_fill(~(see | ~real[:, :, None])[:, None], -torch.inf)
    z = x.clone().requires_grad_()
    y = attention(z, rotary(z, where.clamp(min=0)), mask)[0] * real[..., None]
    (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
    grads = under_our_names({n: p.grad for n, p in attention.named_parameters()}, q_lora_rank)
    want = [y, z.grad, *(grads[n] for n, _ in m.named_parameters())]
    for form in ("expanded", "absorbed"):
        for a, b in zip(numbers(m, form, x, pos), want, strict=True):
            assert (a - b).abs().max() < 1e-5 * max(1, b.abs().max()), form
    state, got = m.init_state(3, 50, torch.float32, CPU), []
    length, past = torch.zeros(3, dtype=torch.long), 0
    with torch.no_grad():
        for i, j in ((0, 13), (13, 14), (14, 15), (15, 50)):                               # through the state, in pieces
            at = Positions(3, j - i, CPU, None if pos is None else pos[:, i:j], length, past)
            got.append(m(x[:, i:j], at, state))
            length, past = at.next(length), past + j - i
    assert ((torch.cat(got, 1) - y) * real[..., None]).abs().max() < 1e-5 * max(1, y.abs().max())
