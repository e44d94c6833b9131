"""linear, retention and gla: against their formulas pair by pair in float64, Hugging Face's MiniMax and yet-another-retnet."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny

from config import GPTConfig
from mixers import parse
from ops.positions import Positions
from ops.rope import alibi_slopes

CPU = torch.device("cpu")
PACKED = torch.tensor([[*range(20), *range(50)], [-1] * 4 + [*range(66)], [*range(11), *range(3), *range(47)] + [-1] * 9])


def made(word, **cfg):
    """The mixer of one word, loud."""
    torch.manual_seed(0)
    ((cls, options),) = parse(word)[0]
    m = cls(GPTConfig(**{**dict(n_embd=48, n_head=4, head_dim=12, norm_eps=1e-6), **cfg}), options)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() > 1 else 1))
    return m


def turned(t, theta, exponents, layout):
    """t (T, D) as complex numbers times e^(i pos angle)."""
    D = t.shape[1]
    a, b = t.chunk(2, 1) if layout == "half" else (t[:, ::2], t[:, 1::2])
    angle = torch.arange(len(t))[:, None].double() * theta ** -exponents
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], 1) if layout == "half" else torch.stack([z.real, z.imag], 2).view(-1, D)


def literal(word, m, x):
    """One document x (T, C): every head's weights of every pair, written out, in float64."""
    x, T, K, V, r = x.double(), len(x), m.K, m.V, m.H // m.G
    def times(layer, x):
        return x @ layer.weight.double().T + (0 if layer.bias is None else layer.bias.double())
    rows = list(times(m.qkv, x).split(m.rows, 1))
    lightning = "lightning" in word
    if lightning:
        rows[:3] = [F.silu(t) for t in rows[:3]]
    gate = rows[3] if len(rows) == 4 else None
    q, k, v = (t.view(T, -1, n).transpose(0, 1) for t, n in zip(rows, (K, K, V)))
    if word.startswith("gla") and not lightning:
        alpha = times(m.decay_out, x @ m.decay_in.weight.double().T).sigmoid() ** (1 / m.root)
        a = alpha.log().view(T, m.G, K).transpose(0, 1)
    out = []
    for h in range(m.H):
        qh, kh, vh, below = q[h], k[h // r], v[h // r], torch.ones(T, T).tril().double()
        if word.startswith("linear"):
            phi = (lambda t: torch.where(t > 0, t + 1, t.exp())) if "silu" not in word else (lambda t: t * t.sigmoid())
            qh, kh = phi(qh), phi(kh)
            z = (qh @ kh.T * below).sum(1, keepdim=True)
            if m.turn:
                qh, kh = (turned(t, 1e4, torch.arange(0, K, 2).double() / K, "half") for t in (qh, kh))
            y = (qh @ kh.T * below) @ vh
            y = y / z if m.normalize else y * K**-0.5 / ((y * K**-0.5).square().mean(1, keepdim=True) + m.cfg.norm_eps).sqrt()
        elif word.startswith("retention"):
            qh, kh = (turned(t, 1e4, torch.arange(K // 2).double() / (K // 2 - 1), "interleaved") for t in (qh, kh)) if m.rope else (qh, kh)
            gamma = 1 - 2.0 ** (-5 - h // r)
            D = gamma ** (torch.arange(T)[:, None] - torch.arange(T)).double() * below
            y = (qh @ kh.T * D) @ vh / K**0.5
            y = (y - y.mean(1, keepdim=True)) / (y.var(1, correction=0, keepdim=True) + m.cfg.norm_eps).sqrt()
        else:
            if lightning:
                c = (-m.slope * alibi_slopes(m.G)[h // r] * torch.arange(T)[:, None].double()).expand(T, K)
            else:
                qh, c = qh / K**0.5, a[h // r].cumsum(0)
            fade = (c[:, None] - c[None]).masked_fill(below[..., None] == 0, -torch.inf).exp()
            y = torch.einsum("ic,jc,ijc->ij", qh, kh, fade) @ vh
            if not lightning:
                y = y / (y.square().mean(1, keepdim=True) + m.cfg.norm_eps).sqrt() * m.norm.weight.double()
        out.append(y)
    y = torch.cat(out, 1)
    if lightning:
        y = y / (y.square().mean(1, keepdim=True) + m.cfg.norm_eps).sqrt() * m.norm.weight.double()
    if gate is not None:
        y = y * gate.sigmoid() * (1 if lightning else gate)
    return times(m.out, y).float()


WORDS = ["linear", "linear(rope=False)", "linear(feature='silu', normalize=False)", "retention", "retention(expand_v=1, rope=False)", "gla",
         "gla(expand_k=1.0, gate_root=1.0, gate_rank=3)", "gla(decay='lightning', slope=0.7)"]


@pytest.mark.parametrize("G", [4, 2])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("word", WORDS)
def test_it_is_the_formula_forward_backward_and_in_pieces(word, pos, G):
    # eps: the norm of a first token, which sees itself alone, may be of next to nothing
    m, x = made(word, n_kv_head=G, bias=True, norm_eps=0.1), torch.randn(3, 70, 48, generator=torch.Generator().manual_seed(1))
    sides = []
    for slow in (True, False):
        m.zero_grad()
        z = x.clone().requires_grad_()
        if slow:
            y = torch.zeros_like(x)
            for row in range(3):
                for start in [0] if pos is None else (pos[row] == 0).nonzero()[:, 0].tolist():
                    end = next((i for i in range(start + 1, 70) if pos is not None and pos[row, i] <= 0), 70)
                    y = y.index_put((torch.tensor(row), torch.arange(start, end)), literal(word, m, z[row, start:end]))
        else:
            y = m(z, Positions(3, 70, CPU, pos)) * (1 if pos is None else (pos >= 0)[..., None])
        (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
        sides.append({"y": y.detach(), "x": z.grad, **{n: p.grad.clone() for n, p in m.named_parameters()}})
    want, got = sides
    for n, t in want.items():
        assert (got[n] - t).abs().max() < 3e-5 * max(1, t.abs().max()), n
    for pieces in ([13, 1, 1, 55], [1] * 70):
        state, length, past, out = m.init_state(3, 70, torch.float32, CPU), torch.zeros(3, dtype=torch.long), 0, []
        for n in pieces:
            part = slice(past, past + n)
            at = Positions(3, n, CPU, None if pos is None else pos[:, part], length, past)
            with torch.no_grad():
                out.append(m(x[:, part], at, state))
            length, past = at.next(length), past + n
        got = torch.cat(out, 1) * (1 if pos is None else (pos >= 0)[..., None])
        torch.testing.assert_close(got, want["y"], rtol=1e-4, atol=1e-4)


def test_lightning_is_minimax_s():
    """transformers' MiniMaxLightningAttention with the same weights; without fla in the environment it is plain torch."""
    minimax = pytest.importorskip("transformers.models.minimax.modeling_minimax")
    cfg = minimax.MiniMaxConfig(hidden_size=48, num_attention_heads=4, num_key_value_heads=4, head_dim=12, num_hidden_layers=4, block_size=16)
    layer = 2
    theirs = minimax.MiniMaxLightningAttention(cfg, layer)
    slope = 1 - layer / (3 + 1e-5) + 1e-5
    m, x = made(f"gla(decay='lightning', slope={slope})"), torch.randn(2, 70, 48)
    q, k, v, gate = m.qkv.weight.detach().split(m.rows)
    theirs.qkv_proj.weight.data = torch.stack([t.view(4, 12, 48) for t in (q, k, v)], 1).flatten(0, 2)
    theirs.output_gate.weight.data, theirs.out_proj.weight.data, theirs.norm.weight.data = gate, m.out.weight.data, m.norm.weight.data
    sides = []
    for ours in (True, False):
        z = x.clone().requires_grad_()
        y = m(z, Positions(2, 70, CPU)) if ours else theirs(z, None, None)[0]
        sides.append((y, *torch.autograd.grad(y.sin().sum(), z)))
    for a, b in zip(*sides):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
def test_retention_in_its_three_forms_is_yet_another_retnet_s(form):
    """Its MultiScaleRetention has the paper's decays for 5 heads alone, and values as wide as keys."""
    if importlib.util.find_spec("yet_another_retnet") is None:
        pytest.skip("pip install --no-deps yet-another-retnet")
    pytest.importorskip("einops")
    from yet_another_retnet.retention import MultiScaleRetention
    m, x = made("retention(expand_v=1)", n_embd=40, n_head=5, head_dim=8), torch.randn(2, 70, 40)
    theirs = MultiScaleRetention(40, 5, group_norm_eps=1e-6, bias=False)
    parts = [theirs.q_proj, theirs.k_proj, theirs.v_proj, theirs.g_proj]
    for layer, w in zip(parts, m.qkv.weight.detach().split(m.rows)):
        layer.weight.data = w
    theirs.out_proj.weight.data = m.out.weight.data
    theirs.eval()
    if form == "parallel":
        y = theirs.forward_parallel(x, x, x)[0]
    else:
        past, out = None, []
        for i in range(0, 70, 1 if form == "recurrent" else 14):
            if form == "recurrent":
                y, past = theirs.forward_recurrent(x[:, i], x[:, i], x[:, i], i, past)
            else:
                y, past = theirs.forward_chunkwise(*[x[:, i:i + 14]] * 3, i, past)
            out.append(y if y.dim() == 3 else y[:, None])
        y = torch.cat(out, 1)
    torch.testing.assert_close(m(x, Positions(2, 70, CPU)), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word, numbers", [("linear", 2 * 8 * 9), ("linear(normalize=False)", 2 * 8 * 8), ("retention", 2 * 8 * 16), ("gla", 2 * 4 * 8)])
def test_a_row_s_state_is_a_matrix_a_key_head_in_float32_whatever_the_context(word, numbers):
    for n in (10, 1000):
        layer = tiny(layers=word, n_kv_head=2).init_state(3, n, torch.bfloat16).layers[0]
        assert sum(t.numel() * t.element_size() for t in layer.values()) == 3 * 4 * numbers


@pytest.mark.parametrize("bias", [-60.0, 60.0])
def test_gates_shut_or_open_give_finite_gradients(bias):
    """Log decays of -60 and of -1e-26."""
    m, x = made("gla(gate_root=1.0)"), torch.randn(2, 70, 48, requires_grad=True)
    m.decay_out.bias.data.fill_(bias)
    y = m(x, Positions(2, 70, CPU))
    y.square().sum().backward()
    assert y.isfinite().all() and all(t.grad.isfinite().all() for t in [x, *m.parameters()])


def test_a_gate_starts_with_states_that_live_for_23_tokens():
    m = tiny(layers="gla").blocks[0].mixer
    assert m.K == 4 and m.V == 8 and m.decay_out.bias.abs().max() < 1       # zeros, and the noise of tiny


@pytest.mark.parametrize("fields, message", [
    (dict(layers="linear(feature='identity')"), "set normalize=False"), (dict(layers="linear(feature='exp')"), "feature"),
    (dict(layers="linear", position="alibi"), "linear has no ALiBi"), (dict(layers="retention(expand_v=0)"), "expand_v=0 must be above 0"),
    (dict(layers="gla(decay='lightening')"), "decay"), (dict(layers="gla(gate_rnk=3)"), "did you mean 'gate_rank'?"),
    (dict(layers="retention", head_dim=5, position="none"), "head_dim=5 is odd"),
])
def test_wrong_options_are_one_line(fields, message):
    with pytest.raises(ValueError) as e:
        tiny(**fields)
    assert message in str(e.value) and "\n" not in str(e.value)
