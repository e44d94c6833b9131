"""Muon against torch's own, and as part of a run."""

from dataclasses import replace

import pytest
import torch
from conftest import tiny
from test_train import config, metrics, same  # noqa: F401

from config import TrainConfig
from engine.muon import Muon, matrices, orthogonalize
from engine.optim import make_optimizer, set_learning_rate
from train import train


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 40), (2, 40, 8), (1, 64, 200)])
def test_orthogonal_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    s = torch.linalg.svdvals(orthogonalize(torch.randn(shape)).float())
    assert s.min() > 0.3 and s.max() < 1.3
    G = torch.randn(shape)
    alone = torch.cat([orthogonalize(g[None]) for g in G])
    torch.testing.assert_close(orthogonalize(G), alone, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8)])
def test_steps_equal_torchs(shape):
    torch.manual_seed(0)
    a = torch.nn.Parameter(torch.randn(shape))
    b = torch.nn.Parameter(a.detach().clone())
    ours = Muon([a], lr=0.1, momentum=0.85, weight_decay=0.1)     # at 0.85 the warm-up changes nothing
    theirs = torch.optim.Muon([b], lr=0.1, momentum=0.85, weight_decay=0.1, nesterov=True, adjust_lr_fn="original")
    for _ in range(5):
        a.grad = torch.randn(shape)
        b.grad = a.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_matrices_that_lie_in_one_are_orthogonalized_apart():
    torch.manual_seed(0)
    w = torch.randn(24, 8)
    whole = torch.nn.Parameter(w.clone())
    parts = [torch.nn.Parameter(t.clone()) for t in w.split([8, 4, 12])]
    whole.grad = torch.randn(24, 8)
    for p, g in zip(parts, whole.grad.split([8, 4, 12])):
        p.grad = g.clone()
    Muon([{"params": [whole], "rows": [8, 4, 12]}]).step()
    Muon(parts).step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("kw", [dict(), dict(tie_embeddings=False, bias=True, norm="layernorm", qk_norm=True, position="learned"), dict(mlp="relu2", n_kv_head=1)])
def test_muon_takes_the_hidden_matrices_and_adamw_the_rest(kw):
    model = tiny(**kw)
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", learning_rate=0.1, muon_lr=0.5))
    muon, adamw = ([p for g in o.param_groups for p in g["params"]] for o in optimizer.optimizers)
    assert len({*muon, *adamw}) == len(muon) + len(adamw) == len(list(model.parameters()))
    assert {id(p) for p in muon} == {id(p) for n, p in model.named_parameters() if p.dim() == 2 and "blocks" in n}
    assert all(rows is None or sum(rows) == p.shape[0] for p, rows in matrices(model))
    lr = set_learning_rate(optimizer, TrainConfig(learning_rate=0.1, warmup_iters=9), 0)
    assert lr == pytest.approx(0.01) and {round(g["lr"], 9) for g in optimizer.param_groups} == {0.01, 0.05}


def test_a_run_with_muon_resumes_exactly(config):  # noqa: F811
    config = replace(config, optimizer="muon", lr_decay_iters=12)
    train(replace(config, out_dir=config.out_dir + "_whole"))
    train(replace(config, max_iters=5))
    train(replace(config, init_from="resume"))
    assert metrics(config.out_dir) == metrics(config.out_dir + "_whole") and same(config.out_dir, config.out_dir + "_whole")
