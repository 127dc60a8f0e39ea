"""AFT-conv with one tap per head: the gather equals the dense form, and the penalty is smallest there."""

from __future__ import annotations

from math import prod

import pytest
import torch

from tokenmix import MixerError, build_mixer, functional
from tokenmix.lab.train.sparsity import head_penalties, one_hot_penalty
from tokenmix.mixers import Inputs
from tokenmix.models import ViTConfig, build_model
from tokenmix.models.one_hot import OneHotConv, aft_one_hot, largest_taps, sources, to_gather

DIM, HEADS = 8, 4


def layer(ndim, gate="sigmoid", **options):
    torch.manual_seed(1)
    return build_mixer(
        "aft_conv", DIM, heads=HEADS, kernel_size=5, ndim=ndim, reparam=False, init_std=1.5, gate=gate, **options
    ).double()


SHAPES = {
    "sequence": (1, None, 0, 9),
    "line": (1, (7,), 2, 9),
    "image": (2, (4, 5), 0, 20),
    "image with class token": (2, (3, 4), 2, 14),
    "film": (3, (2, 3, 3), 1, 19),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", ["all", "masked", "some"])
@pytest.mark.parametrize("gate", ["sigmoid", None])
def test_the_gather_is_the_dense_form_of_the_one_hot_filter(shape, given, gate):
    ndim, grid, prefix, T = SHAPES[shape]
    mixer = layer(ndim, gate)
    x = 3 * torch.randn(2, T, DIM, dtype=torch.float64)
    options = {} if grid is None else {"grid": grid, "prefix": prefix}
    if given == "masked":
        options["key_mask"] = torch.rand(2, T) > 0.4
        options["key_mask"][1] = False
    if given == "some":
        x = x[:, : T - 3]
        options["positions"] = torch.stack([torch.randperm(T)[: T - 3] for _ in range(2)])
    gather = to_gather(mixer)
    args, full = mixer.functional_args(Inputs(x, **options))
    dense = mixer.out_proj(functional.aft_conv(*args[:3], gather.kernel(), **full))
    assert float((gather(x, **options) - dense).detach().abs().max()) <= 1e-12
    assert int((gather.kernel() != 0).sum()) == HEADS
    assert not torch.allclose(gather(x, **options), mixer(x, **options)) or given == "masked"


@pytest.mark.parametrize("log_weight", [-60.0, -1.0, 0.0, 5.0, 60.0])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_nothing_cancels(log_weight, scale):
    """Where the one key that counts less is by far the largest, total + (e^w - 1) tap would be its rounding error."""
    torch.manual_seed(3)
    grid, T = (4, 5), 20
    q, v = torch.randn(2, 2, T, DIM, dtype=torch.float64)
    k = scale * torch.randn(2, T, HEADS, dtype=torch.float64)
    offset = torch.tensor([[0, 0], [1, -1], [-1, 0], [0, 1]])
    weight = torch.full((HEADS,), log_weight, dtype=torch.float64)
    kernel = torch.zeros(HEADS, 3, 3, dtype=torch.float64)
    kernel[torch.arange(HEADS), offset[:, 0] + 1, offset[:, 1] + 1] = log_weight
    found, logits = aft_one_hot(q, k, v, offset, weight, grid=grid), torch.zeros(2, HEADS, T, T, dtype=torch.float64)
    for h in range(HEADS):
        logits[:, h] = k[..., h][:, None]
        for t, s in enumerate(sources(offset, grid, 0, None, T)[0, h].tolist()):
            if s >= 0:
                logits[:, h, t, s] += log_weight
    want = torch.sigmoid(q) * (logits.softmax(-1) @ v.unflatten(-1, (HEADS, -1)).transpose(1, 2)).transpose(
        1, 2
    ).flatten(2)
    assert float((found - want).abs().max()) <= 1e-12
    assert float((found - functional.aft_conv(q, k, v, kernel, grid=grid)).abs().max()) <= 1e-12


def test_gradients_are_those_of_the_dense_form():
    mixer, x = layer(2), torch.randn(2, 20, DIM, dtype=torch.float64)
    gather = to_gather(mixer)
    (args, full), own = mixer.functional_args(Inputs(x, grid=(4, 5))), gather.weight
    kernel = gather.kernel()
    want = torch.autograd.grad(
        functional.aft_conv(*args[:3], kernel, **full).square().sum(), [own, mixer.k_proj.weight, mixer.v_proj.weight]
    )
    args, full = gather.functional_args(Inputs(x, grid=(4, 5)))
    found = torch.autograd.grad(
        aft_one_hot(*args, **full).square().sum(), [own, gather.k_proj.weight, gather.v_proj.weight]
    )
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_half_precision_and_nothing_at_all():
    mixer, x = layer(2), torch.randn(1, 20, DIM)
    gather = to_gather(mixer.float())
    low = to_gather(mixer.bfloat16())(x.bfloat16(), grid=(4, 5))
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), gather(x, grid=(4, 5)), atol=0.05, rtol=0.05)
    assert gather(x[:0], grid=(4, 5)).shape == (0, 20, DIM)


def test_where_taps_fall():
    offset = torch.tensor([[0, 1], [-1, 0]])
    found = sources(offset, (2, 3), 1, None, 7)[0].tolist()
    assert found == [[-1, 2, 3, -1, 5, 6, -1], [-1, -1, -1, -1, 1, 2, 3]]
    kept = sources(offset, (2, 3), 1, torch.tensor([[0, 5, 6, 2]]), 4)[0].tolist()
    assert kept == [[-1, 2, -1, -1], [-1, 3, -1, -1]]


def test_the_largest_tap_is_kept():
    kernel = torch.zeros(3, 3, 3)
    kernel[0, 0, 2], kernel[0, 1, 1] = 1.0, -0.9
    kernel[1, 2, 1], kernel[1, 0, 0] = -3.0, 0.6
    offset, weight, kept = largest_taps(kernel)
    assert offset[:2].tolist() == [[-1, 1], [1, 0]]
    torch.testing.assert_close(weight, torch.tensor([1.0, -3.0, 0.0]))
    extra = torch.expm1(torch.tensor([1.0, -0.9, -3.0, 0.6], dtype=torch.float64)).abs()
    torch.testing.assert_close(
        kept,
        torch.stack([extra[0] / (extra[0] + extra[1]), extra[2] / (extra[2] + extra[3]), torch.ones_like(extra[0])]),
    )


def vit(**options):
    spec = {"name": "aft_conv", "heads": HEADS, "kernel_size": 3, **options}
    config = ViTConfig(
        dim=DIM, layers=2, mixers=(spec,), image_size=(8, 12), patch=4, channels=1, classes=3, mlp_ratio=2, registers=1
    )
    torch.manual_seed(0)
    return build_model(config).double()


def test_a_model_becomes_one_of_gathers():
    model, images = vit(), torch.randn(2, 1, 8, 12, dtype=torch.float64)
    # One-hot filters through the paper's own parameters: two values of the normalised filter, one of them moved to 0.
    for block in model.blocks:
        m = block.mixer
        with torch.no_grad():
            m.raw.zero_()
            m.raw[torch.arange(HEADS), torch.randint(3, (HEADS,)), torch.randint(3, (HEADS,))] = 1.0
            m.gamma.uniform_(-0.5, 0.5)
            m.beta.copy_(-m.kernel().flatten(1).median(1).values)
    gather = to_gather(model)
    assert all(isinstance(b.mixer, OneHotConv) and bool((b.mixer.kept > 1 - 1e-9).all()) for b in gather.blocks)
    assert not any(isinstance(b.mixer, OneHotConv) for b in model.blocks)
    torch.testing.assert_close(gather(images), model(images), atol=1e-6, rtol=0)
    keep = torch.tensor([[0, 3, 5], [4, 1, 2]])
    torch.testing.assert_close(gather(images, keep=keep), model(images, keep=keep), atol=1e-6, rtol=0)
    assert gather.state_dict()["blocks.0.mixer.weight"].shape == (HEADS,)
    assert float(one_hot_penalty(model).detach()) < 0.02


def test_what_cannot_be_a_gather_is_refused():
    with pytest.raises(MixerError, match="outside='none'"):
        to_gather(layer(2, outside="none"))
    with pytest.raises(MixerError, match="causal=True"):
        to_gather(layer(1, causal=True))
    with pytest.raises(MixerError, match="Linear has no AFT-conv"):
        to_gather(torch.nn.Linear(2, 2))
    with pytest.raises(MixerError, match="grids of 2 dimensions"):
        to_gather(layer(2))(torch.randn(1, 20, DIM, dtype=torch.float64))
    with pytest.raises(MixerError, match="aft_one_hot: expects q and v"):
        aft_one_hot(*torch.zeros(3, 1, 4, 8), torch.zeros(2, 1).long(), torch.zeros(2))


def test_cost_does_not_grow_with_the_kernel():
    assert prod((5, 5)) == layer(2).raw[0].numel()
    gather = to_gather(layer(2))
    assert gather.cost(20).mixing < layer(2).cost(20).mixing / 5
    assert gather.facts.about.time == "T D"


def test_penalty_of_known_filters():
    w = torch.zeros(4, 3, 3, dtype=torch.float64)
    w[0, 0, 2] = 2.0
    w[1] = -0.7
    w[2, 0, 0], w[2, 1, 1] = 3.0, -4.0
    found = head_penalties(w, eps=1e-12)
    torch.testing.assert_close(
        found, torch.tensor([0.0, 1, (7 / 5 - 1) / 2, 1], dtype=torch.float64), atol=1e-9, rtol=0
    )
    torch.testing.assert_close(head_penalties(3 * w[:3], eps=1e-12), found[:3], atol=1e-9, rtol=0)


def test_penalty_at_the_start_and_down_to_one_tap():
    model = vit()
    penalty = one_hot_penalty(model)
    penalty.backward()
    assert float(penalty.detach()) == pytest.approx(1.0)
    assert all(
        bool(b.mixer.gamma.grad.isfinite().all()) and bool(b.mixer.raw.grad.isfinite().all()) for b in model.blocks
    )
    for block in model.blocks:
        torch.nn.init.normal_(block.mixer.gamma, std=0.3)
    own = [p for name, p in model.named_parameters() if name.endswith(("raw", "gamma", "beta"))]
    before = [p.detach().clone() for p in own]
    assert torch.autograd.gradcheck(
        lambda *p: torch.func.functional_call(Penalty(model), dict(zip(names(model), p, strict=True)), ()), own
    )
    optimiser = torch.optim.Adam(own, 0.02)
    for _ in range(400):
        optimiser.zero_grad()
        one_hot_penalty(model).backward()
        optimiser.step()
    assert float(one_hot_penalty(model).detach()) < 0.1
    assert any(not torch.equal(a, b) for a, b in zip(own, before, strict=True))
    gather = to_gather(model)
    assert float(torch.cat([b.mixer.kept for b in gather.blocks]).mean()) > 0.8
    images = torch.randn(2, 1, 8, 12, dtype=torch.float64)
    assert float((gather(images) - model(images)).detach().abs().max()) < 0.05 * float(
        model(images).detach().abs().max()
    )


class Penalty(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self):
        return one_hot_penalty(self.model)


def names(model):
    return [f"model.{name}" for name, _ in model.named_parameters() if name.endswith(("raw", "gamma", "beta"))]


def test_penalty_needs_filters():
    with pytest.raises(MixerError, match="Linear has no AFT-conv"):
        one_hot_penalty(torch.nn.Linear(2, 2))
    with pytest.raises(MixerError, match="more than one tap"):
        one_hot_penalty(vit(kernel_size=1))
    with pytest.raises(MixerError, match="eps must be positive"):
        one_hot_penalty(vit(), eps=0.0)
