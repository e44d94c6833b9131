"""Dropout with four decisions a draw."""

import pytest
import torch

from ops.dropout import Dropout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.2, 0.5, 0.97])
def test_each_element_is_dropped_with_probability_p_and_the_rest_is_scaled(p, dtype):
    torch.manual_seed(0)
    y = Dropout(p).train()(torch.ones(400, 1001, dtype=dtype))           # no multiple of four
    assert y.dtype == dtype and y.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=5e-3)
    kept = (y != 0).float()
    sd = (p * (1 - p)) ** 0.5
    assert abs(kept.mean() - (1 - p)) < 5 * sd / 400_400 ** 0.5
    assert (kept.flatten()[:400_400].view(-1, 4).mean(0) - (1 - p)).abs().max() < 5 * sd / 100_100 ** 0.5      # each of the four
    assert abs(y.double().mean() - 1) < 5 * (p / (1 - p) / 400_400) ** 0.5 + (0.01 if dtype == torch.bfloat16 else 0)
    for lag in (1, 2, 3, 4, 1001):                                       # neighbours know nothing of each other
        a, b = kept.flatten()[:-lag] - (1 - p), kept.flatten()[lag:] - (1 - p)
        assert abs((a * b).mean()) < 5 * sd**2 / 400_000 ** 0.5


def test_the_gradient_passes_where_the_value_does():
    x = torch.randn(50, 50, requires_grad=True)
    y = Dropout(0.3).train()(x)
    y.sum().backward()
    torch.testing.assert_close(y, x * x.grad)


def test_the_seed_decides_and_evaluation_draws_nothing():
    drop, x = Dropout(0.5), torch.ones(100)
    torch.manual_seed(1)
    a, b = drop(x), drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), a) and not torch.equal(a, b)
    before = torch.get_rng_state()
    assert drop.eval()(x) is x and Dropout(0.0).train()(x) is x and torch.equal(torch.get_rng_state(), before)


def test_a_compiled_model_and_an_empty_tensor_do_too():
    assert Dropout(0.5).train()(torch.ones(0, 4)).shape == (0, 4)
    y = torch.compile(Dropout(0.5).train(), backend="eager")(torch.ones(1000))
    assert set(y.tolist()) == {0.0, 2.0}
