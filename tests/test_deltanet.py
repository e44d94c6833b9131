"""deltanet, gated_deltanet and kda: against transformers' layers of Qwen3-Next and Kimi Linear with our weights."""

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import fed, tiny, tokens

from config import GPTConfig
from mixers import MIXERS, parse
from mixers.deltanet import DeltaNet, DeltaOptions
from mixers.gated_deltanet import GatedDeltaNet
from mixers.kda import KDA
from ops.positions import Positions

CPU = torch.device("cpu")
near = dict(rtol=1e-5, atol=3e-5)     # two chunked forms in float32, behind an RMSNorm of small numbers


def loud(cls, options, **kw):
    torch.manual_seed(0)
    m = cls(GPTConfig(**{**dict(n_embd=32, n_head=4, norm_eps=1e-6), **kw}), options)
    with torch.no_grad():
        for name, p in m.named_parameters():
            p.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return m


def module_of(name):
    assert not importlib.util.find_spec("fla"), "transformers would run fla's kernels instead of its own functions"
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}"), pytest.importorskip(f"transformers.models.{name}.configuration_{name}")


def qwen(m):
    """Qwen3NextGatedDeltaNet whose weights are m's. Its rows go by key head: q, k, then its value heads' v, and z."""
    modeling, configuration = module_of("qwen3_next")
    cfg = configuration.Qwen3NextConfig(hidden_size=32, linear_num_value_heads=m.H, linear_num_key_heads=m.G, linear_key_head_dim=m.K,
                                        linear_value_head_dim=m.V, linear_conv_kernel_dim=m.conv.shape[1], rms_norm_eps=m.norm.eps,
                                        num_hidden_layers=1, layer_types=["linear_attention"], hidden_act="silu")
    theirs = modeling.Qwen3NextGatedDeltaNet(cfg, 0)
    q, k, v = (t.unflatten(0, (m.G, -1)) for t in m.qkv.weight.split(m.widths))
    b, a, z = (t.weight.unflatten(0, (m.G, -1)) for t in (m.beta, m.a, m.z))
    theirs.load_state_dict({"in_proj_qkvz.weight": torch.cat([q, k, v, z], 1).flatten(0, 1), "in_proj_ba.weight": torch.cat([b, a], 1).flatten(0, 1),
                            "conv1d.weight": m.conv[:, None], "A_log": m.A_log, "dt_bias": m.dt_bias, "norm.weight": m.norm.weight,
                            "out_proj.weight": m.out.weight})
    return theirs, {"conv1d.weight": m.conv, "A_log": m.A_log, "dt_bias": m.dt_bias, "norm.weight": m.norm.weight, "out_proj.weight": m.out.weight}


def kimi(m):
    modeling, configuration = module_of("kimi_linear")
    cfg = configuration.KimiLinearConfig(hidden_size=32, linear_num_heads=m.H, linear_head_dim=m.K, linear_conv_kernel_dim=m.conv.shape[1],
                                         rms_norm_eps=m.norm.eps, num_hidden_layers=1, layer_types=["linear_attention"], mlp_layer_types=["dense"])
    theirs = modeling.KimiLinearDeltaAttention(cfg, 0)
    q, k, v = m.qkv.weight.split(m.widths)
    same = {"forget_gate.f_a_proj.weight": m.f_down.weight, "forget_gate.f_b_proj.weight": m.f_up.weight, "forget_gate.dt_bias": m.dt_bias,
            "b_proj.weight": m.beta.weight, "g_a_proj.weight": m.g_down.weight, "g_b_proj.weight": m.g_up.weight, "o_norm.weight": m.norm.weight,
            "o_proj.weight": m.out.weight}
    theirs.load_state_dict({**same, "forget_gate.A_log": m.A_log.view(1, 1, -1, 1), "conv1d.weight": m.conv[:, None],
                            "q_proj.weight": q, "k_proj.weight": k, "v_proj.weight": v})
    return theirs, {**same, "conv1d.weight": m.conv, "forget_gate.A_log": m.A_log}


@pytest.mark.parametrize("T", [1, 9, 100])
@pytest.mark.parametrize("name", ["qwen", "qwen, heads apart", "kimi"])
def test_it_is_transformers_layer_forward_and_backward(name, T):
    """Outputs, the gradient of the input, and those of the weights that both hold alike."""
    if name == "kimi":
        m = loud(KDA, DeltaOptions())
        theirs, alike = kimi(m)
    else:
        m = loud(GatedDeltaNet, DeltaOptions(key_heads=2, key_dim=6, value_dim=10) if "apart" in name else DeltaOptions())
        theirs, alike = qwen(m)
    x = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
    loud_ = torch.randn(2, T, 32, generator=torch.Generator().manual_seed(2))
    want, got = theirs(x), m(x, Positions(2, T, CPU))
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, **near)
    a = torch.autograd.grad((got * loud_).sum(), [x, *alike.values()])
    b = torch.autograd.grad((want * loud_).sum(), [x, *(theirs.get_parameter(n) for n in alike)])
    m.double()                # in float64 ours is what both are measured by: transformers' chunks stay in float32
    x = x.detach().double().requires_grad_()
    exact = torch.autograd.grad((m(x, Positions(2, T, CPU)) * loud_).sum(), [x, *alike.values()])
    for mine, other, so in zip(a, b, exact):
        size = max(1, so.abs().max())
        assert (mine - so).abs().max() < 1e-5 * size
        assert (other.view_as(so) - so).abs().max() < (1e-4 if name == "kimi" else 2e-5) * size     # its 4e-5 on AMX, where ours is 3e-6


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_its_state_is_transformers(name):
    """After a prompt, and after tokens one by one: h, and the outputs on the way."""
    from transformers.cache_utils import DynamicCache
    m = loud(*((KDA, DeltaOptions()) if name == "kimi" else (GatedDeltaNet, DeltaOptions(key_heads=2))))
    theirs, _ = (kimi if name == "kimi" else qwen)(m)
    x, state, length = torch.randn(2, 80, 32), m.init_state(2, 80, torch.float32, CPU), torch.zeros(2, dtype=torch.long)
    _, configuration = module_of("kimi_linear" if name == "kimi" else "qwen3_next")
    cls = configuration.KimiLinearConfig if name == "kimi" else configuration.Qwen3NextConfig
    kinds = dict(mlp_layer_types=["dense"]) if name == "kimi" else {}
    cache, a = DynamicCache(config=cls(num_hidden_layers=1, layer_types=["linear_attention"], **kinds)), 0
    with torch.no_grad():
        for n in [75, 1, 1, 1, 1, 1]:
            got = m(x[:, a:a + n], Positions(2, n, CPU, None, length, a), state)
            torch.testing.assert_close(got, theirs(x[:, a:a + n], cache=cache), **near)
            torch.testing.assert_close(state["h"], cache.get_recurrent_state(0), **near)
            length, a = length + n, a + n


def test_deltanet_is_the_paper_s_recurrence():
    """A token at a time from the module's weights: W x, convolution, SiLU, length 1, the rule in its product form, RMSNorm, W_O."""
    m, x = loud(DeltaNet, DeltaOptions(heads=2, key_dim=5, value_dim=7, conv=3)), torch.randn(20, 32, dtype=torch.float64)
    m = m.double()
    m.norm.eps = 0.0
    qkv, rows, S = x @ m.qkv.weight.T, [], torch.zeros(2, 5, 7, dtype=torch.float64)
    for t in range(20):
        mixed = F.silu(sum(m.conv[:, 2 - j] * qkv[t - j] for j in range(3) if t >= j))
        q, k, v = mixed[:10].view(2, 5), mixed[10:20].view(2, 5), mixed[20:].view(2, 7)
        q, k = (u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt() for u in (q, k))
        beta = torch.sigmoid(m.beta.weight @ x[t])
        for h in range(2):
            S[h] = (torch.eye(5) - beta[h] * torch.outer(k[h], k[h])) @ S[h] + beta[h] * torch.outer(k[h], v[h])
        o = torch.stack([S[h].clone().T @ q[h] / math.sqrt(5) for h in range(2)])
        rows.append(m.out.weight @ (o / o.square().mean(-1, keepdim=True).sqrt() * m.norm.weight).flatten())
    torch.testing.assert_close(m(x[None], Positions(1, 20, CPU))[0].float(), torch.stack(rows).float(), rtol=1e-5, atol=1e-5)


def test_negative_lets_a_key_s_share_change_its_sign():
    """beta = 2 at a key of length 1 mirrors the state there: its eigenvalue is -1."""
    m = loud(DeltaNet, DeltaOptions(negative=True))
    assert m.most == 2 and loud(DeltaNet, DeltaOptions()).most == 1
    x = torch.randn(2, 9, 32)
    with torch.no_grad():
        m.beta.weight.zero_()                                  # beta is 1 in the one, 1/2 in the other
    assert not torch.allclose(m(x, Positions(2, 9, CPU)), loud(DeltaNet, DeltaOptions())(x, Positions(2, 9, CPU)))


@pytest.mark.parametrize("word", ["gated_deltanet", "kda"])
def test_decays_start_as_in_the_paper(word):
    """Rates up to 16, steps of 0.001 to 0.1."""
    torch.manual_seed(0)
    m = MIXERS[word](GPTConfig(n_embd=512, n_head=64), DeltaOptions())
    rate, step = m.A_log.exp(), F.softplus(m.dt_bias)
    assert rate.max() <= 16.001 and rate.min() >= 0.0099 and step.min() > 0.00099 and step.max() < 0.1001
    assert 0.005 < step.median() < 0.02                        # log-uniform: the middle is 0.01


@pytest.mark.parametrize("word", ["deltanet", "gated_deltanet", "kda"])
def test_extreme_gates_give_finite_gradients(word):
    model = tiny(layers=word).train()
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.beta.weight.mul_(1e4)                  # beta 0 or 1
            for name in ("a", "f_up"):
                if hasattr(block.mixer, name):
                    getattr(block.mixer, name).weight.mul_(1e3)    # log decays of 0 or of thousands
    x = tokens(2, 150)
    loss = model(x, x.roll(-1, 1))
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())


def test_the_state_does_not_grow():
    model = tiny(layers="gated_deltanet*1 kda")
    a, b = (model.init_state(1, n).layers for n in (8, 4096))
    assert [{n: t.shape for n, t in layer.items()} for layer in a] == [{n: t.shape for n, t in layer.items()} for layer in b]
    torch.testing.assert_close(fed(model, tokens(1, 30), [30], model.init_state(1, 4)), model(tokens(1, 30)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options, message", [("key_heads=3", "key_heads=3 must divide heads=4"), ("conv=0", "conv=0 must be above 0"),
                                              ("key_head=2", "did you mean 'key_heads'?")])
def test_what_does_not_fit_is_one_line(options, message):
    with pytest.raises(ValueError) as e:
        tiny(layers=f"gated_deltanet({options})")
    assert message in str(e.value) and "\n" not in str(e.value)
    assert parse("deltanet")[0][0][0] is DeltaNet
