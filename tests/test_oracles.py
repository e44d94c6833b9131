"""Hugging Face's GPT-2, Llama, Qwen3, Mistral and SmolLM2-shaped models with random weights: the same logits from ours."""

import pytest
import torch
from conftest import fed

from model import GPT, GPTConfig

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")

COMMON = dict(vocab_size=99, hidden_size=32, intermediate_size=56, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              max_position_embeddings=128, attn_implementation="eager", rms_norm_eps=1e-6)
OURS = dict(vocab_size=99, n_embd=32, n_inner=56, n_layer=3, n_head=4, n_kv_head=2, block_size=128, norm_eps=1e-6)
CASES = {
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=3, n_head=4, n_positions=128, attn_implementation="eager")),
             dict(position="learned", norm="layernorm", mlp="gelu_tanh", bias=True, n_kv_head=None, n_inner=None, norm_eps=1e-5)),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, tie_word_embeddings=False)), dict(tie_embeddings=False)),
    "smollm2": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e5})),
                dict(rope_theta=1e5)),
    "qwen3": (lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, head_dim=16, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
              dict(qk_norm=True, head_dim=16, rope_theta=1e6)),
    "mistral": (lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**COMMON, sliding_window=9, tie_word_embeddings=False)), dict(window=9, tie_embeddings=False)),
}


def ours(theirs, cfg: GPTConfig) -> dict[str, torch.Tensor]:
    """Their weights under our names."""
    w, out = theirs.state_dict(), {}
    if cfg.position == "learned":
        names = {"norm1": "ln_1", "mixer.qkv": "attn.c_attn", "mixer.out": "attn.c_proj", "norm2": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
        out |= {"wte.weight": w["transformer.wte.weight"], "wpe.weight": w["transformer.wpe.weight"], "head.weight": w["lm_head.weight"]}
        out |= {f"norm.{part}": w[f"transformer.ln_f.{part}"] for part in ("weight", "bias")}
        for i in range(cfg.n_layer):
            for a, b in names.items():
                for part in ("weight", "bias"):
                    t = w[f"transformer.h.{i}.{b}.{part}"]
                    out[f"blocks.{i}.{a}.{part}"] = t.T if t.dim() == 2 else t       # Conv1D keeps its matrices transposed
        return out
    out |= {"wte.weight": w["model.embed_tokens.weight"], "head.weight": w["lm_head.weight"], "norm.weight": w["model.norm.weight"]}
    for i in range(cfg.n_layer):
        a, b = f"model.layers.{i}.", f"blocks.{i}."
        out[b + "norm1.weight"], out[b + "norm2.weight"] = w[a + "input_layernorm.weight"], w[a + "post_attention_layernorm.weight"]
        out[b + "mixer.qkv.weight"] = torch.cat([w[f"{a}self_attn.{n}_proj.weight"] for n in "qkv"])
        out[b + "mixer.out.weight"] = w[a + "self_attn.o_proj.weight"]
        out[b + "mlp.up.weight"] = torch.cat([w[f"{a}mlp.{n}_proj.weight"] for n in ("gate", "up")])
        out[b + "mlp.down.weight"] = w[a + "mlp.down_proj.weight"]
        if cfg.qk_norm:
            out |= {f"{b}mixer.{n}_norm.weight": w[f"{a}self_attn.{n}_norm.weight"] for n in "qk"}
    return out


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_hugging_faces(name):
    build, fields = CASES[name]
    torch.manual_seed(0)
    theirs = build().eval()
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            p.copy_(torch.randn_like(p) * 0.1 + (1 if "norm" in n or ("ln_" in n and n.endswith("weight")) else 0))
    model = GPT(GPTConfig(**{**OURS, **fields})).eval()
    model.load_state_dict(ours(theirs, model.cfg), strict=True)
    x = torch.randint(99, (2, 40))
    with torch.no_grad():
        want = theirs(x).logits
        assert want.std() > 0.3
        torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(fed(model, x, [1, 17, 1, 21]), want, rtol=1e-5, atol=1e-5)
        pad = torch.cat([torch.zeros(2, 7, dtype=torch.long), torch.ones(2, 33, dtype=torch.long)], 1)
        pos = torch.where(pad > 0, pad.cumsum(1) - 1, -1)
        padded = theirs(x, attention_mask=pad, position_ids=pos.clamp(min=0)).logits
        torch.testing.assert_close(model(x, pos=pos)[:, 7:], padded[:, 7:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 8, 12, 6])
def test_alibi_slopes_equal_blooms(heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    from ops.rope import alibi_slopes
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(alibi_slopes(heads)), theirs)


def test_masks_equal_hugging_faces():
    from transformers.masking_utils import and_masks, packed_sequence_mask_function, sdpa_mask, sliding_window_causal_mask_function

    from ops.attend import How, see
    from ops.positions import Positions
    pos = torch.cat([torch.arange(9), torch.arange(4), torch.arange(12)])[None]
    at = Positions(1, 25, pos.device, pos)
    want = sdpa_mask(1, 25, 25, q_offset=0, kv_offset=0, allow_is_causal_skip=False,
                     mask_function=and_masks(sliding_window_causal_mask_function(5), packed_sequence_mask_function(at.doc)))
    assert torch.equal(see(at, at.keys_new(), How(window=5)), want)
