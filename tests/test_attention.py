"""The word attention: its options by hand, and against Hugging Face's gpt-oss (learned sinks), Qwen3-Next (output gate, partial rotation)
and Gemma 3 (another base in local layers)."""

import pytest
import torch
from conftest import fed, tiny, tokens

from config import GPTConfig
from mixers.attention import Attention, AttentionOptions
from mixers.sparse import parse
from ops.attend import How, attend
from ops.positions import Positions
from ops.rope import Rotation
from ops.sparse import gathered

CPU = torch.device("cpu")
PACKED = torch.tensor([[*range(20), *range(30)], [-1] * 4 + [*range(46)], [*range(41)] + [-1] * 9])
close = dict(rtol=1e-5, atol=1e-5)


def loud(cfg: dict, options: dict) -> Attention:
    torch.manual_seed(0)
    m = Attention(GPTConfig(**{**dict(n_embd=48, n_head=4, n_kv_head=2, head_dim=16, norm_eps=1e-6), **cfg}), AttentionOptions(**options))
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 1.0 if name == "sink_logit" else 0.2)
    return m


def numbers(m: Attention, x: torch.Tensor, pos: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Output and gradients; padding counts for nothing."""
    m.zero_grad()
    x = x.clone().requires_grad_()
    y = m(x, Positions(*x.shape[:2], CPU, pos))
    y = y if pos is None else y * (pos >= 0)[..., None]
    (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad.clone() for n, p in m.named_parameters()}}


def in_pieces(m: Attention, x: torch.Tensor, pos: torch.Tensor | None) -> torch.Tensor:
    B, T = x.shape[:2]
    state, length, past, out = m.init_state(B, T, torch.float32, CPU), torch.zeros(B, dtype=torch.long), 0, []
    with torch.no_grad():
        for i, j in ((0, 13), (13, 14), (14, 15), (15, T)):
            at = Positions(B, j - i, CPU, None if pos is None else pos[:, i:j], length, past)
            out.append(m(x[:, i:j], at, state))
            length, past = at.next(length), past + j - i
    return torch.cat(out, 1)


# by hand

def literal(m: Attention, x: torch.Tensor, window: int = 0, theta: float = 10000.0, rotary: int = 16, gated: bool = False) -> torch.Tensor:
    """One document x (T, C), a head and a query at a time, in float64; rows of qkv: 4 queries, 2 keys, 2 values, 4 gates of 16."""
    w = [h.T for h in m.qkv.weight.double().split(16)]
    x, T = x.double(), len(x)

    def turned(t):
        angle = torch.arange(T)[:, None].double() * theta ** (-torch.arange(0, rotary, 2).double() / rotary)
        z = torch.complex(t[:, :rotary // 2], t[:, rotary // 2:rotary]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag, t[:, rotary:]], 1)

    heads = []
    for h in range(4):
        q, k, v = turned(x @ w[h]), turned(x @ w[4 + h // 2]), x @ w[6 + h // 2]
        rows = []
        for t in range(T):
            first = max(0, t + 1 - window) if window else 0
            s = (k[first:t + 1] @ q[t] / 4).exp()
            rows.append((s @ v[first:t + 1]) / (s.sum() + (0 if m.sink_logit is None else m.sink_logit[h].double().exp())))
        heads.append(torch.stack(rows) * ((x @ w[8 + h]).sigmoid() if gated else 1))
    return (torch.cat(heads, 1) @ m.out.weight.double().T).float()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("options", [dict(sink_logit=True), dict(gate=True), dict(theta=100.0, rotary=6), dict(sink_logit=True, window=7, gate=True, rotary=2)])
def test_options_by_hand(options, pos, backend):
    m, x = loud(dict(attention_backend=backend), options), torch.randn(3, 50, 48, generator=torch.Generator().manual_seed(1))
    got = numbers(m, x, pos)
    m.zero_grad()
    z, want = x.clone().requires_grad_(), torch.zeros_like(x)
    for row in range(3):
        starts = [0] if pos is None else (pos[row] == 0).nonzero()[:, 0].tolist()
        for start in starts:
            end = next((i for i in range(start + 1, 50) if pos is not None and pos[row, i] <= 0), 50)
            y = literal(m, z[row, start:end], gated=options.get("gate", False), **{k: v for k, v in options.items() if k not in ("gate", "sink_logit")})
            want = want.index_put((torch.tensor(row), torch.arange(start, end)), y)
    (want * torch.arange(want.numel()).view_as(want).sin()).sum().backward()
    for name, t in {"y": want, "x": z.grad, **{n: p.grad for n, p in m.named_parameters()}}.items():
        assert (got[name] - t).abs().max() < 1e-5 * max(1, t.abs().max()), name
    real = slice(None) if pos is None else pos >= 0
    torch.testing.assert_close(in_pieces(m, x, pos)[real], want[real], **close)


@pytest.mark.parametrize("other", ["theta=1e6", "rotary=4", "theta=1e6, rotary=4"])
def test_layers_of_one_model_have_rotations_of_their_own(other):
    """Tables are remembered by width and base: the second layer must not take the first's."""
    model, x = tiny(layers=f"attention attention({other})"), torch.randn(2, 40, 32)
    at = Positions(2, 40, CPU)
    model.blocks[0](x, at)
    got = model.blocks[1](x, at)
    torch.testing.assert_close(got, model.blocks[1](x, Positions(2, 40, CPU)), rtol=0, atol=0)
    m = model.blocks[1].mixer
    m.rotary, m.turn = 8, Rotation(8, 10000.0)
    assert not torch.allclose(got, model.blocks[1](x, Positions(2, 40, CPU)))


@pytest.mark.parametrize("word", ["attention(sink_logit=True)", "attention(window=7, sinks=2, sink_logit=True)", "sparse(pattern='local(6) | strided(7)', sink_logit=True)"])
def test_a_sink_of_minus_infinity_is_none_and_a_great_one_takes_all(word):
    model, plain, x = tiny(layers=word), tiny(layers=word.replace(", sink_logit=True", "").replace("(sink_logit=True)", "")), tokens(2, 90)
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "sink" not in n})
    for b in model.blocks:
        b.mixer.sink_logit.data.fill_(-1e4)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=2e-5)
    for b in model.blocks:
        b.mixer.sink_logit.data.fill_(1e4)
    assert (model.blocks[0].mixer(model.wte(x), Positions(2, 90, CPU)) == 0).all()


@pytest.mark.parametrize("fields", [dict(position="alibi"), dict(attn_softcap=3.0), dict(n_kv_head=1, position="none"), dict(rope_layout="interleaved")])
@pytest.mark.parametrize("word", ["attention(sink_logit=True, gate=True, rotary=4)", "attention(window=9, sinks=2, sink_logit=True)", "sparse(sink_logit=True, pattern='local(6) | strided(7)')"])
def test_the_models_settings_hold(word, fields):
    model, slow, x = tiny(layers=word, **fields), tiny(layers=word, attention_backend="reference", **fields), tokens(2, 100)
    torch.testing.assert_close(model(x), slow(x), rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(fed(model, x, [70, 1, 29]), slow(x), rtol=1e-5, atol=2e-5)
    if not fields.get("rope_layout"):
        with torch.no_grad():
            torch.testing.assert_close(tiny(layers=word, attention_backend="flex", **fields)(x), slow(x), rtol=1e-5, atol=2e-5)


def test_layers_with_and_without_a_sink_do_not_share_masks():
    x = tokens(3, 50)
    for layers in ("attention(sink_logit=True) attention", "attention(window=9) attention(window=9, sink_logit=True)"):
        slow, model = (tiny(layers=layers, attention_backend=backend) for backend in ("reference", "sdpa"))
        torch.testing.assert_close(model(x, pos=PACKED), slow(x, pos=PACKED), **close)


@pytest.mark.parametrize("great", [0.0, 100.0])
@pytest.mark.parametrize("text", ["local(6) | strided(7)", "fixed(8)", "local(6) / first(3)"])
def test_gathered_keys_have_the_sink_too(text, great):
    g, results = torch.Generator().manual_seed(0), []
    q, k, v = (torch.randn(2, h, 70, 8, generator=g).requires_grad_() for h in (4, 2, 2))
    b = (torch.tensor([0.0, 1.0, -1.0, 2.0]) + torch.tensor([great, 0, 0, -great])).requires_grad_()
    for fast in (False, True):
        at, pattern = Positions(2, 70, CPU), parse(text)
        y = gathered(q, k, v, at, pattern, How(sink_logit=b)) if fast else attend(q, k, v, at, backend="reference", keep=pattern, sink_logit=b)
        results.append((y, *torch.autograd.grad(y.sin().sum(), (q, k, v, b))))
    for want, got in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_gate_begins_at_a_half_and_a_sink_at_nothing_but_one_key():
    m = Attention(GPTConfig(n_embd=48, n_head=4), AttentionOptions(sink_logit=True, gate=True))
    assert (m.sink_logit == 0).all() and m.qkv.parts == [48] * 4 and m.qkv.out_features == 4 * 48
    assert Attention(GPTConfig(n_embd=48, n_head=4), AttentionOptions()).sink_logit is None


@pytest.mark.parametrize("layers, message", [
    ("attention(rotary=3)", "rotary=3 must be even, and at most head_dim=8"), ("attention(rotary=10)", "at most head_dim=8"), ("attention(rotary=0)", "rotary=0 must be above 0"),
    ("attention(theta=0)", "theta=0.0 must be above 0"), ("attention(gate=1)", "gate=1 is no bool"), ("sparse(sink_logt=True)", "did you mean 'sink_logit'?"), ("nsa(gate=True)", "nsa has no option 'gate'"),
])
def test_wrong_options_are_one_line(layers, message):
    with pytest.raises(ValueError) as e:
        tiny(layers=layers)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_traced_by_the_compiler_it_is_the_same_in_one_graph():
    model, x = tiny(layers="attention(sink_logit=True, gate=True) attention(window=7, sink_logit=True, rotary=4)"), tokens(2, 90)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x), rtol=1e-5, atol=1e-5)


# Hugging Face

COMMON = dict(hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, num_hidden_layers=2, max_position_embeddings=128,
              attn_implementation="eager")


def theirs(name: str, layer: int):
    """Their attention, its cos and sin, and ours for it: fields of the model, options of the word, weights from their names."""
    transformers = pytest.importorskip("transformers")
    from transformers.models import gemma3, gpt_oss, qwen3_next
    if name == "gpt-oss":
        cfg = transformers.GptOssConfig(**COMMON, sliding_window=7, layer_types=["sliding_attention", "full_attention"], attention_bias=True,
                                        rope_parameters={"rope_type": "default", "rope_theta": 150000.0})
        there, rotary = gpt_oss.modeling_gpt_oss.GptOssAttention(cfg, layer), gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(cfg)
        ours = dict(bias=True), dict(sink_logit=True, theta=150000.0, window=0 if layer else 7)
    elif name == "qwen3-next":
        cfg = transformers.Qwen3NextConfig(**COMMON, layer_types=["full_attention"] * 2, rope_parameters={"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25})
        there, rotary = qwen3_next.modeling_qwen3_next.Qwen3NextAttention(cfg, layer), qwen3_next.modeling_qwen3_next.Qwen3NextRotaryEmbedding(cfg)
        ours = dict(qk_norm=True), dict(gate=True, rotary=4, theta=1e5)
    else:
        cfg = transformers.Gemma3TextConfig(**COMMON, sliding_window=7, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=16, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": {"rope_type": "default", "rope_theta": 1e6}})
        rotary = gemma3.modeling_gemma3.Gemma3RotaryEmbedding(cfg)
        there = gemma3.modeling_gemma3.Gemma3Attention(cfg, layer)
        ours = dict(qk_norm=True), (dict(theta=1e6, window=0) if layer else dict(theta=1e4, window=7))
    torch.manual_seed(0)
    with torch.no_grad():
        for n, p in there.named_parameters():
            p.normal_(0.0, 1.0 if n == "sinks" else 0.2)
    args = (cfg.layer_types[layer],) if name == "gemma3" else ()
    return there, lambda x, pos: rotary(x, pos, *args), ours


def under_our_names(w: dict[str, torch.Tensor], grad: bool = False) -> dict[str, torch.Tensor]:
    """Weights or gradients. Qwen3-Next's q_proj has each head's queries, then its gates; its and Gemma's norms have 1 added."""
    out = {}
    for part in ("weight", "bias"):
        if f"q_proj.{part}" in w:
            q, gates = w[f"q_proj.{part}"], []
            if len(q) == 2 * 64:
                q, gate = q.unflatten(0, (4, 2, 16)).unbind(1)
                q, gates = q.flatten(0, 1), [gate.flatten(0, 1)]
            out[f"qkv.{part}"] = torch.cat([q, w[f"k_proj.{part}"], w[f"v_proj.{part}"], *gates])
            out[f"out.{part}"] = w[f"o_proj.{part}"]
    out |= {n: w[n] + (0 if grad else 1) for n in ("q_norm.weight", "k_norm.weight") if n in w}
    return out | ({"sink_logit": w["sinks"]} if "sinks" in w else {})


@pytest.mark.slow
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("name, layer", [("gpt-oss", 0), ("gpt-oss", 1), ("qwen3-next", 0), ("gemma3", 0), ("gemma3", 1)])
def test_equals_hugging_faces(name, layer, pos):
    there, table, (cfg, options) = theirs(name, layer)
    m = loud(cfg, options)
    m.load_state_dict(under_our_names(there.state_dict()))
    x = torch.randn(3, 50, 48, generator=torch.Generator().manual_seed(1))
    where = torch.arange(50).expand(3, 50) if pos is None else pos
    doc, real, W = (where == 0).cumsum(1), where >= 0, options.get("window") or 99
    see = (doc[:, :, None] == doc[:, None]) & (where[:, :, None] >= where[:, None]) & (where[:, :, None] - where[:, None] < W) & real[:, None]
    mask = torch.zeros(3, 1, 50, 50).masked_fill(~(see | ~real[:, :, None])[:, None], -torch.inf)
    z = x.clone().requires_grad_()
    y = there(z, table(z, where.clamp(min=0)), mask)[0] * real[..., None]
    (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
    want = {"y": y, "x": z.grad, **under_our_names({n: p.grad for n, p in there.named_parameters()}, grad=True)}
    got = numbers(m, x, pos)
    assert set(got) == set(want) and y.std() > 0.2
    for n, t in want.items():
        assert (got[n] - t).abs().max() < 1e-5 * max(1, t.abs().max()), n
    assert ((in_pieces(m, x, pos) - y) * real[..., None]).abs().max() < 1e-5 * max(1, y.abs().max())
