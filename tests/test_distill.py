"""Layer-wise distillation: zero for a copy, gradients for the student only, and it teaches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenmix import MixerError
from tokenmix.hosts import convert_vit
from tokenmix.lab.train.teacher_loss import distill_loss, layer_outputs
from tokenmix.models import ViTConfig, build_model

TINY = ViTConfig(dim=16, layers=3, mixers=({"name": "attention", "heads": 2},), image_size=(12, 16), patch=4, classes=3)
CONV = {"name": "aft_conv", "heads": 4, "kernel_size": 3}


def teacher(**options):
    model = build_model(replace(TINY, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def test_layer_outputs_are_what_the_residuals_take():
    model, x = teacher(), torch.randn(2, 3, 12, 16)
    seen = layer_outputs(model, x)
    assert torch.equal(seen.logits, model(x))
    assert len(seen.inputs) == len(seen.outputs) == 3
    for block, before, mixed, after in zip(model.blocks, seen.inputs, seen.outputs, seen.inputs[1:], strict=False):
        h = before + mixed
        torch.testing.assert_close(h + block.mlp(block.mlp_norm(h)), after)
    assert not any(block._forward_pre_hooks or block.mixer._forward_hooks for block in model.blocks), "no hook stays"


def test_hooks_go_when_the_model_fails():
    model = teacher()
    with pytest.raises(MixerError):
        layer_outputs(model, torch.randn(1, 3, 20, 20))
    assert not any(block._forward_pre_hooks or block.mixer._forward_hooks for block in model.blocks)


def test_zero_for_an_identical_model():
    model = teacher()
    student, _ = convert_vit(model, TINY)
    loss = distill_loss(student.eval(), model, torch.randn(2, 3, 12, 16), logits_weight=2.0, temperature=3.0)
    assert loss.item() == 0
    with torch.no_grad():
        student.blocks[1].mixer.v_proj.weight += 0.1
    x = torch.randn(2, 3, 12, 16)
    assert distill_loss(student, model, x, layers=[0, 2], logits_weight=0).item() == 0
    assert distill_loss(student, model, x, layers=[-2], logits_weight=0).item() > 1e-4
    assert distill_loss(student, model, x, layers=()).item() > 1e-8


def test_the_loss_is_what_it_says():
    model, x, tau = teacher(), torch.randn(2, 3, 12, 16), 2.0
    student, _ = convert_vit(model, {"name": "aft_simple"}, seed=1)
    student.eval()
    with torch.no_grad():
        tokens, terms = model.embed(x)[0], []
        for mine, theirs in zip(student.blocks, model.blocks, strict=True):
            terms.append(
                (mine.mixer(mine.mixer_norm(tokens)) - theirs.mixer(theirs.mixer_norm(tokens))).square().mean()
            )
            tokens = theirs(tokens)
        p, q = ((z(x) / tau).softmax(-1) for z in (model, student))
        kl = (p * (p / q).log()).sum(-1).mean()
        found = distill_loss(student, model, x, logits_weight=0.7, temperature=tau)
    torch.testing.assert_close(found, torch.stack(terms).mean() + 0.7 * tau**2 * kl)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_gradients_reach_the_student_only_and_steps_lower_the_loss(pool):
    model, x = teacher(registers=1), torch.randn(8, 3, 12, 16)
    shell = {} if pool == "class" else {"pool": "mean", "registers": 0, "positions": None}
    student, _ = convert_vit(model, replace(model.config, mixers=(CONV,), **shell), seed=1)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        loss = distill_loss(student, model, x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(p.grad is None for p in model.parameters())
    assert all(block.mixer.q_proj.weight.grad.any() for block in student.blocks)
    assert losses[-1] < 0.6 * losses[0]


def test_patches_are_compared_where_the_student_has_nothing_else():
    model, x = teacher(registers=2), torch.randn(2, 3, 12, 16)
    student, _ = convert_vit(
        model, replace(model.config, mixers=({"name": "hydra"},), pool="mean", registers=0), seed=1
    )
    block, seen = student.blocks[0], layer_outputs(model, x)
    wanted = (block.mixer(block.mixer_norm(seen.inputs[0][:, 3:])) - seen.outputs[0][:, 3:]).square().mean()
    torch.testing.assert_close(distill_loss(student, model, x, layers=[0], logits_weight=0), wanted)


def test_models_that_do_not_match_are_refused():
    model, x = teacher(), torch.randn(1, 3, 12, 16)
    for options, words in (
        ({"layers": 2}, "layers=2"),
        ({"dim": 8}, "dim=8"),
        ({"image_size": (16, 16)}, "image_size"),
        ({"registers": 1}, "2 tokens before the patches"),
        ({"classes": 4}, "logits are"),
    ):
        with pytest.raises(MixerError, match=words):
            distill_loss(build_model(replace(TINY, **options)), model, x)
    distill_loss(build_model(replace(TINY, classes=4)), model, x, logits_weight=0)
    with pytest.raises(MixerError, match="training mode"):
        distill_loss(model, build_model(TINY), x)
    for options, words in (
        ({"layers": [3]}, "layers must be"),
        ({"temperature": 0}, "temperature"),
        ({"logits_weight": -1}, "logits_weight"),
    ):
        with pytest.raises(MixerError, match=words):
            distill_loss(build_model(TINY), model, x, **options)
