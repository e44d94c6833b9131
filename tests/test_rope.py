"""Rotary positions, sinusoids and ALiBi's slopes."""

import pytest
import torch

from ops.rope import Rotation, alibi_slopes, angles, inverse_frequencies, rotate, sinusoids

FAR = torch.tensor([[0, 1, 255, 256, 257, 258, 4095, 16383, 131072]])


@pytest.mark.parametrize("under", ["float32", "bfloat16 model", "autocast"])
def test_angles_keep_every_position_apart_whatever_the_models_dtype(under, monkeypatch):
    """In bfloat16 positions above 256 fall onto each other (C8)."""
    from conftest import tiny
    model = tiny(n_embd=64, n_head=1)
    seen = []
    original = Rotation.table
    monkeypatch.setattr(Rotation, "table", lambda *a: seen.append(original(*a)) or seen[-1])
    if under == "bfloat16 model":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=under == "autocast"):
        model(torch.zeros_like(FAR), pos=FAR)
    cos, sin = seen[0]
    exact = FAR[0, :, None].double() * 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    assert cos.dtype == torch.float32
    got = torch.atan2(sin.double(), cos.double())[0, 0]
    off = (got - exact + torch.pi) % (2 * torch.pi) - torch.pi
    assert (off.abs() < 1e-6 * (FAR[0, :, None] + 1)).all()
    assert torch.cdist(torch.cat([cos, sin], -1)[0, 0], torch.cat([cos, sin], -1)[0, 0]).add(torch.eye(9)).min() > 1e-3


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_distance_alone(layout):
    q, k = torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(0)), torch.randn(1, 1, 1, 64, generator=torch.Generator().manual_seed(1))
    inv = inverse_frequencies(64)

    def score(i, j):
        turn = lambda x, p: rotate(x, *angles(torch.tensor([[p]]), inv), layout)
        return (turn(q, i) * turn(k, j)).sum()

    for i, j in [(0, 0), (5, 2), (100, 3), (1000, 999)]:
        for shift in (7, 1000, 131072 - 1000):
            torch.testing.assert_close(score(i, j), score(i + shift, j + shift), rtol=0, atol=1e-5)


def test_layouts_agree_after_permuting_the_channels():
    x = torch.randn(2, 3, 5, 16)
    cos, sin = angles(torch.arange(5).expand(2, 5), inverse_frequencies(16))
    perm = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    torch.testing.assert_close(rotate(x[..., perm], cos, sin, "half"), rotate(x, cos, sin, "interleaved")[..., perm])
    complex_form = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)).flatten(-2)
    torch.testing.assert_close(rotate(x, cos, sin, "interleaved"), complex_form)


def test_sinusoids_are_the_papers():
    y = sinusoids(torch.tensor([[0, 3, 50]]), 6)[0]
    for row, p in enumerate((0, 3, 50)):
        for c in range(6):
            angle = torch.tensor(p / 10000 ** (2 * (c // 2) / 6))
            torch.testing.assert_close(y[row, c], angle.sin() if c % 2 == 0 else angle.cos(), rtol=0, atol=1e-6)


def test_alibi_slopes():
    assert alibi_slopes(8) == [2.0**-h for h in range(1, 9)]
    assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]
    assert len(alibi_slopes(12)) == 12 and alibi_slopes(12)[:8] == alibi_slopes(8)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_is_transformers(layout):
    """Llama's is the half layout, Cohere's the interleaved one; theirs has angles in float32."""
    transformers = pytest.importorskip("transformers")
    if layout == "half":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding as Rotary
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
        cfg = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2)
    else:
        from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding as Rotary
        from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb
        cfg = transformers.CohereConfig(hidden_size=64, num_attention_heads=2, rope_parameters=dict(rope_type="default", rope_theta=1e4))
    q, k = (torch.randn(3, 2, 50, 32, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    pos = torch.stack([torch.arange(50), torch.arange(50) + 7, torch.arange(50).flip(0)])
    want = apply_rotary_pos_emb(q, k, *Rotary(cfg)(q, pos))
    for t, w in zip((q, k), want):
        torch.testing.assert_close(rotate(t, *angles(pos, inverse_frequencies(32)), layout), w, rtol=1e-5, atol=1e-5)
