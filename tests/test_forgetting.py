"""Forgetting attention: against the formula query by query in float64, flash-linear-attention's naive form, ALiBi and plain attention."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens

from config import GPTConfig
from mixers.attention import AttentionOptions
from mixers.forgetting import Forgetting
from ops import forgetting as module
from ops.attend import attend
from ops.forgetting import decayed
from ops.positions import Positions
from ops.rope import alibi_slopes

CPU = torch.device("cpu")
PACKED = torch.tensor([[*range(20), *range(30)], [-1] * 4 + [*range(46)], [*range(11), *range(3), *range(27)] + [-1] * 9])
close = dict(rtol=1e-5, atol=1e-5)


def loud(cfg: dict, options: dict) -> Forgetting:
    torch.manual_seed(0)
    m = Forgetting(GPTConfig(**{**dict(n_embd=48, n_head=4, n_kv_head=2, head_dim=12, norm_eps=1e-6), **cfg}), AttentionOptions(**options))
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 1.0 if p.dim() == 1 and "norm" not in name else 0.2)
    return m


def literal(m: Forgetting, x: torch.Tensor) -> torch.Tensor:
    """One document x (T, C), a head and a query at a time, in float64."""
    x, T, D, r = x.double(), len(x), m.D, m.H // m.G
    rows = (x @ m.qkv.weight.double().T + (0 if m.qkv.bias is None else m.qkv.bias.double())).split(D, 1)
    gates = (x @ m.forget.weight.double().T + m.forget_bias.double()).sigmoid()

    def told(t, norm):
        if m.cfg.qk_norm:
            t = t / (t.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        if not m.turn:
            return t
        angle = torch.arange(T)[:, None].double() * 10000.0 ** (-torch.arange(0, D, 2).double() / D)
        z = torch.complex(*t.chunk(2, 1)) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], 1)

    norms = (m.q_norm, m.k_norm) if m.cfg.qk_norm else (None, None)
    out = []
    for h in range(m.H):
        q, k, v = told(rows[h], norms[0]), told(rows[m.H + h // r], norms[1]), rows[m.H + m.G + h // r]
        ys = []
        for t in range(T):
            first = max(0, t + 1 - m.window) if m.window else 0
            decay = [gates[j + 1:t + 1, h].log().sum() - (alibi_slopes(m.H)[h] * (t - j) if m.cfg.position == "alibi" else 0) for j in range(first, t + 1)]
            w = (k[first:t + 1] @ q[t] / D**0.5 + torch.stack(decay)).exp()
            ys.append(w @ v[first:t + 1] / (w.sum() + (0 if m.sink_logit is None else m.sink_logit[h].double().exp())))
        out.append(torch.stack(ys) * (rows[m.H + 2 * m.G + h].sigmoid() if len(m.counts) == 4 else 1))
    return (torch.cat(out, 1) @ m.out.weight.double().T + (0 if m.out.bias is None else m.out.bias.double())).float()


CASES = {
    "gqa": ({}, {}), "heads of their own": (dict(n_kv_head=4), {}), "mqa": (dict(n_kv_head=1), {}), "no rope": (dict(position="none"), {}), "window": ({}, dict(window=7)),
    "all options": (dict(qk_norm=True, bias=True), dict(gate=True, sink_logit=True, window=9)), "alibi": (dict(position="alibi"), dict(sink_logit=True)),
    "wide window": ({}, dict(window=64)),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("pos", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_paper_s_formula_forward_backward_and_in_pieces(case, pos, backend):
    cfg, options = CASES[case]
    m, x = loud(dict(attention_backend=backend, **cfg), options), torch.randn(3, 50, 48, generator=torch.Generator().manual_seed(1))
    results = []
    for slow in (True, False):
        m.zero_grad()
        z = x.clone().requires_grad_()
        if slow:
            y = torch.zeros_like(x)
            for row in range(3):
                for start in [0] if pos is None else (pos[row] == 0).nonzero()[:, 0].tolist():
                    end = next((i for i in range(start + 1, 50) if pos is not None and pos[row, i] <= 0), 50)
                    y = y.index_put((torch.tensor(row), torch.arange(start, end)), literal(m, z[row, start:end]))
        else:
            y = m(z, Positions(3, 50, CPU, pos)) * (1 if pos is None else (pos >= 0)[..., None])
        (y * torch.arange(y.numel()).view_as(y).sin()).sum().backward()
        results.append({"y": y.detach(), "x": z.grad, **{n: p.grad.clone() for n, p in m.named_parameters()}})
    want, got = results
    assert want["forget.weight"].abs().max() > 0.1
    for n, t in want.items():
        assert (got[n] - t).abs().max() < 1e-5 * max(1, t.abs().max()), n
    for pieces in ([13, 1, 1, 35], [1] * 50, [22, 28]):
        state, length, past, out = m.init_state(3, 50, torch.float32, CPU), torch.zeros(3, dtype=torch.long), 0, []
        for part in (range(sum(pieces[:i]), sum(pieces[:i + 1])) for i in range(len(pieces))):
            at = Positions(3, len(part), CPU, None if pos is None else pos[:, part], length, past)
            with torch.no_grad():
                out.append(m(x[:, part], at, state))
            length, past = at.next(length), past + len(part)
        got = torch.cat(out, 1) * (1 if pos is None else (pos >= 0)[..., None])
        torch.testing.assert_close(got, want["y"], **close)


# flash-linear-attention

@pytest.fixture(scope="module")
def naive():
    """fla/ops/forgetting_attn/naive.py alone: the package itself wants Triton."""
    spec = importlib.util.find_spec("fla")
    pytest.importorskip("einops")
    if spec is None:
        pytest.skip("pip install --no-deps fla-core")
    spec = importlib.util.spec_from_file_location("fla_forgetting_naive", f"{spec.submodule_search_locations[0]}/ops/forgetting_attn/naive.py")
    out = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(out)
    return out.naive_forgetting_attn


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ImportWarning")
@pytest.mark.parametrize("T, window", [(75, 0), (75, 20), (200, 9)])
@pytest.mark.parametrize("G", [4, 2, 1])
def test_equals_flash_linear_attentions_naive_form(naive, T, window, G):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, T, h, 16, generator=g).requires_grad_() for h in (4, G, G))
    f = F.logsigmoid(torch.randn(2, T, 4, generator=g) * 2 + 1).requires_grad_()
    loud, grads = torch.randn(2, T, 4, 16, generator=g), []
    for ours in (True, False):
        if ours:
            at = Positions(2, T, CPU)
            q_, k_ = decayed(q.transpose(1, 2), k.transpose(1, 2), f.transpose(1, 2), at)
            y = attend(q_, k_, v.transpose(1, 2), at, window=window, scale=0.25).transpose(1, 2)
        else:
            y = naive(q, k, v, f, window_size=window or None)
        grads.append((y, *torch.autograd.grad((y * loud).sum(), (q, k, v, f))))
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=2e-5)


# what is known without an oracle

@pytest.mark.parametrize("options", ["", "window=7, ", "window=70, gate=True, sink_logit=True, "])
def test_gates_that_let_all_through_are_attention(options):
    model, plain, x = tiny(layers=f"forgetting({options})"), tiny(layers=f"attention({options})"), tokens(2, 150)
    for b in model.blocks:
        b.mixer.forget_bias.data.fill_(1e9)
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "forget" not in n})
    torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("options", ["", "window=7"])
def test_gates_of_no_data_are_alibi(options):
    model, alibi, x = tiny(layers=f"forgetting({options})", position="none"), tiny(layers=f"attention({options})", position="alibi"), tokens(2, 150)
    for b in model.blocks:
        b.mixer.forget.weight.data.zero_()
        b.mixer.forget_bias.data.copy_(-torch.tensor(alibi_slopes(4)).expm1().log())
    alibi.load_state_dict({n: t for n, t in model.state_dict().items() if "forget" not in n})
    torch.testing.assert_close(model(x), alibi(x), rtol=1e-5, atol=2e-5)


def test_a_shut_gate_begins_anew_like_a_document():
    model, x = tiny(layers="forgetting", position="none"), tokens(1, 40)
    m, h = model.blocks[0].mixer, model.wte(x)
    f = m.beside
    m.beside = lambda x: (f(x)[0].index_fill(2, torch.tensor(25), -1e4),)
    pos = torch.cat([torch.arange(25), torch.arange(15)])[None]
    torch.testing.assert_close(m(h, Positions(1, 40, CPU)), m(h, Positions(1, 40, CPU, pos)), **close)


def in_double(q, k, v, f):
    q, k, v, c = q.double(), k.double(), v.double(), f.double().cumsum(2)
    n, T = q.shape[1] // k.shape[1], q.shape[2]
    s = q @ k.repeat_interleave(n, 1).mT / q.shape[3] ** 0.5 + c[..., :, None] - c[..., None, :]
    return s.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v.repeat_interleave(n, 1)


@pytest.mark.parametrize("dtype, most", [(torch.float32, 3e-6), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rate", [0.01, 0.5, 4.0])
def test_sums_of_thousands_cost_no_precision(dtype, most, rate):
    """4096 tokens: c reaches -16,000, where float32 is exact to 1e-3, float16 to 8 and bfloat16 to 64."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, 4096, 16, generator=g).to(dtype) for h in (2, 1, 1))
    f = -2 * rate * torch.rand(1, 2, 4096, generator=g)
    at = Positions(1, 4096, CPU)
    q2, k2 = decayed(q, k, f, at)
    assert q2.dtype == dtype and q2.shape[3] == k2.shape[3] == 16 + {torch.float32: 8, torch.float16: 16, torch.bfloat16: 16}[dtype]
    want = in_double(q, k, v, f)
    assert (attend(q2, k2, v, at, scale=0.25) - want).abs().max() < most
    if rate > 0.1:                                                                   # what is 300 tokens away is gone
        assert (attend(q2, k2, v, at, window=300, scale=0.25) - want).abs().max() < most


@pytest.mark.parametrize("word", ["forgetting", "forgetting(window=300)"])
def test_decoding_far_from_the_beginning_is_exact(word):
    model, x = tiny(layers=word, n_layer=1, position="none", block_size=4096), tokens(1, 3000)
    model.blocks[0].mixer.forget_bias.data.fill_(-3.0)                               # c reaches -9,000
    torch.testing.assert_close(fed(model, x, [2990, 1, 1, 8], model.init_state(1, 3000)), model(x), **close)


def test_a_window_costs_memory_linear_in_the_length():
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    for window in (0, 32):
        m = loud(dict(n_head=1, n_kv_head=1), dict(window=window))
        with Watch():
            m(torch.randn(1, 4096, 48), Positions(1, 4096, CPU)).sum().backward()
    assert max(sizes) < 4096 * 4096 / 8


# state

@pytest.mark.parametrize("word, slots", [("forgetting", 100), ("forgetting(window=9)", 9)])
def test_a_token_leaves_its_key_its_value_and_its_log_gates(word, slots):
    model = tiny(layers=word, n_kv_head=2)
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        layer = model.init_state(3, 100, dtype).layers[0]
        assert layer["f"].dtype == torch.float32 and layer["f"].shape == (3, 4, slots + 1, 1)
        assert sum(t.numel() * t.element_size() for t in layer.values()) == 3 * (slots + 1) * (2 * 2 * 8 * size + 4 * 4)


@pytest.mark.parametrize("word", ["forgetting", "forgetting(window=7)", "forgetting(window=20, sink_logit=True)"])
def test_decoding_goes_on_exactly_from_every_length(word):
    model, x = tiny(layers=word, n_kv_head=2), tokens(2, 48)
    whole = model(x)
    for n in range(1, 40):
        torch.testing.assert_close(fed(model, x[:, :n + 8], [n, 1, 2, 5]), whole[:, :n + 8], **close)


def test_a_state_in_bfloat16_keeps_log_gates_whole():
    model, x = tiny(layers="forgetting", n_layer=1), tokens(2, 30)
    state = model.init_state(2, 40, torch.bfloat16)
    model(x, state=state)
    m = model.blocks[0].mixer
    torch.testing.assert_close(state.layers[0]["f"][:, :, :30], m.beside(model.blocks[0].norm1(model.wte(x)))[0], rtol=0, atol=1e-6)


# the word

def test_heads_begin_with_decay_times_from_16_tokens_to_the_context():
    m = Forgetting(GPTConfig(n_embd=48, n_head=4, block_size=1024), AttentionOptions())
    times = -1 / F.logsigmoid(m.forget_bias)
    torch.testing.assert_close(times, torch.tensor([16.0, 64.0, 256.0, 1024.0]), rtol=1e-4, atol=0)
    assert (tiny(layers="forgetting", block_size=8).blocks[0].mixer.forget_bias - m.forget_bias[0]).abs().max() < 2       # 16 for all, and the noise of tiny


def test_backends_agree():
    x = tokens(2, 70)
    for layers in ("forgetting", "forgetting(window=9, sink_logit=True)"):
        want = tiny(layers=layers, n_kv_head=2, attention_backend="reference")(x)
        for backend in ("sdpa", "flex"):
            with torch.no_grad():
                torch.testing.assert_close(tiny(layers=layers, n_kv_head=2, attention_backend=backend)(x), want, **close)


def test_documents_sums_leave_nothing_on_one_another():
    f = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    doc = (PACKED[:2] == 0).cumsum(1)[:, None]
    c = module.running(f, doc)
    want = torch.stack([torch.cat([f[b, :, doc[b, 0] == d].cumsum(1) for d in doc[b, 0].unique()], 1) for b in range(2)])
    torch.testing.assert_close(c, want, rtol=1e-12, atol=1e-12)
    c[0, :, 30].sum().backward()
    assert (f.grad[0, :, :20] == 0).all() and (f.grad[0, :, 20:31] == 1).all()


@pytest.mark.parametrize("fields, message", [
    (dict(layers="forgetting(sinks=2, window=9)"), "forgetting has no sinks"), (dict(layers="forgetting", attn_softcap=3.0), "forgetting has no attn_softcap"),
    (dict(layers="forgetting(gte=True)"), "did you mean 'gate'?"),
])
def test_wrong_options_are_one_line(fields, message):
    with pytest.raises(ValueError) as e:
        tiny(**fields)
    assert message in str(e.value) and "\n" not in str(e.value)


def test_compiled_steps_are_eager_s():
    model, x = tiny(layers="forgetting forgetting(window=9)"), tokens(2, 24)
    want = fed(model, x, [20, 1, 1, 1, 1])
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager")
    state = model.init_state(2, 24)
    got = [run(x[:, :20], state=state)] + [run(x[:, i:i + 1], state=state) for i in range(20, 24)]
    torch.testing.assert_close(torch.cat(got, 1), want, **close)
