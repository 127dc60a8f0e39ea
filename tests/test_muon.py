"""Muon: the same update as torch's, matrices only, and resumed to the bit like every other optimiser."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenmix.lab.train import DataConfig, OptimConfig, RunConfig, TrainConfig, load_run, resume, train
from tokenmix.lab.train.config import SCHEDULES
from tokenmix.lab.train.muon import Muon, orthogonalize
from tokenmix.lab.train.optim import build_optimizers, learning_rate, parameter_roles
from tokenmix.models import LM, LMConfig, in_shell

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MIXED = (
    {"name": "aft_local", "window": 8},
    {"name": "attention", "heads": 2},
    {"name": "aft_conv", "heads": 4, "kernel_size": 5},
)


def matrices() -> list[nn.Parameter]:
    """Square, wide and tall ones, two of each, with gradients."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for shape in ((16, 16), (16, 40), (40, 16)) * 2:
        found.append(nn.Parameter(torch.randn(shape, generator=draw)))
        found[-1].grad = torch.randn(shape, generator=draw)
    return found


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_the_stacked_update_is_that_of_torch(adjust):
    """torch multiplies in bfloat16, so the updates agree to its rounding; the states agree to the bit."""
    ours, theirs = matrices(), matrices()
    options = {"lr": 0.1, "weight_decay": 0.3, "momentum": 0.9, "adjust_lr_fn": adjust}
    first, second = Muon(ours, **options), torch.optim.Muon(theirs, **options)
    for _ in range(3):
        before = [p.detach().clone() for p in ours]
        first.step()
        second.step()
        for a, b, old in zip(ours, theirs, before, strict=True):
            assert torch.equal(first.state[a]["momentum_buffer"], second.state[b]["momentum_buffer"])
            assert (a - b).norm() <= 0.03 * (a - old).norm()
            with torch.no_grad():
                b.copy_(a)


def test_newton_schulz_moves_singular_values_towards_one():
    stack = torch.randn(3, 12, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for given in (stack, stack.mT):
        found = orthogonalize(given, COEFFICIENTS, 5, 1e-7)
        values = torch.linalg.svdvals(found)
        assert found.shape == given.shape
        assert 0.6 < values.min() <= values.max() < 1.3
        left, _, right = torch.linalg.svd(given, full_matrices=False)
        aligned = torch.linalg.multi_dot([left[0].mT, found[0], right[0].mT])
        assert (aligned - torch.diag(aligned.diagonal())).abs().max() < 1e-9  # the singular vectors stay


def test_a_gradient_of_zero_or_none_is_harmless():
    parameters = matrices()
    parameters[0].grad = torch.zeros_like(parameters[0])
    parameters[1].grad = None
    before = [p.detach().clone() for p in parameters[:2]]
    Muon(parameters, lr=0.1, weight_decay=0.0).step()
    assert all(torch.equal(p, old) for p, old in zip(parameters[:2], before, strict=True))


def test_muon_takes_the_linear_weights_of_blocks_and_nothing_else():
    """A bias table has two dimensions as well, but its rows are no features."""
    model = LM(in_shell(LMConfig(dim=16, max_len=32, mixers=MIXED), "modern"))
    adamw, muon = build_optimizers(model, OptimConfig(name="muon", lr=1e-3, muon_lr=0.02))
    names = {id(p): name for name, p in model.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    linear = ("_proj.weight", "mlp.up.weight", "mlp.gate.weight", "mlp.down.weight")
    assert taken == {name for name in names.values() if name.endswith(linear)}
    others = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert taken | others == set(names.values())
    assert not taken & others
    assert {"embed.weight", "head.weight"} < others
    assert [group["scale"] for group in muon.param_groups] == pytest.approx([20.0])


def test_every_parameter_has_a_role():
    model = LM(LMConfig(dim=16, max_len=32, mixers=MIXED))
    roles = parameter_roles(model)
    assert set(roles) == {name for name, _ in model.named_parameters()}
    assert roles["embed.weight"] == roles["positions.weight"] == "embedding"
    assert roles["head.weight"] == "map"
    assert roles["blocks.0.mixer.bias.u"] == "mixer"
    assert roles["blocks.1.mlp.up.bias"] == roles["norm.weight"] == "vector"


def test_warmup_stable_decay():
    config = OptimConfig(lr=1.0, schedule="wsd", warmup=10, decay=0.2, min_lr_ratio=0.1)
    rates = [learning_rate(step, config, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:79] == [1.0] * 69
    assert rates[89] == pytest.approx(0.55)
    assert rates[99] == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resume_is_to_the_bit(schedule, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 30)
    model = in_shell(LMConfig(dim=16, max_len=16, mixers=MIXED[:2]), "modern")
    optim = OptimConfig(name="muon", schedule=schedule, warmup=2, decay=0.5)
    loop = TrainConfig(steps=6, batch_size=2, eval_every=3, eval_bytes=100, save_every=1, keep=9, log_every=1)
    train(RunConfig(model, DataConfig(str(text), seq_len=16), optim, loop), tmp_path / "run")
    wanted = load_run(tmp_path / "run")[0].state_dict()
    for step in (1, 4):
        resume(tmp_path / "run", from_step=step)
        found = load_run(tmp_path / "run")[0].state_dict()
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []
