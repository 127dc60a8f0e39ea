"""Test what checkpointing computes again, beside what the contract promises of every mixer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tokenmix import MixerError, build_mixer, use_backend
from tokenmix.models.layers import BatchNorm2d


@pytest.mark.parametrize("reentrant", [False, True])
def test_batch_norm_moves_its_statistics_once(reentrant):
    torch.manual_seed(0)
    ours, torchs, x = BatchNorm2d(3), torch.nn.BatchNorm2d(3), torch.randn(2, 3, 4, 4, requires_grad=True)
    torchs(x).square().sum().backward()
    want, x.grad = x.grad, None
    checkpoint(ours, x, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close(x.grad, want)
    for name, buffer in torchs.named_buffers():
        assert torch.equal(buffer, getattr(ours, name)), name


def test_performer_draws_its_features_as_often_as_without():
    torch.manual_seed(0)
    plain, x = build_mixer("performer", 8, heads=2, redraw_interval=2).train(), torch.randn(2, 5, 8, requires_grad=True)
    again = copy.deepcopy(plain)
    for model, call in ((plain, plain), (again, lambda x: checkpoint(again, x, use_reentrant=False))):
        torch.manual_seed(1)
        for _ in range(5):
            call(x).square().sum().backward()
        assert int(model.forwards) == 5
    for (name, one), two in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)
    assert torch.equal(plain.projection, again.projection)


def loop(model, x, call):
    """Apply the model three times, each after the one before."""
    for _ in range(3):
        x = x + call(model, x)
    return x


def each(model, x, reentrant):
    return checkpoint(model, x, use_reentrant=reentrant)


WAYS = {
    "each": lambda model, x: loop(model, x, lambda m, x: each(m, x, False)),
    "each reentrant": lambda model, x: loop(model, x, lambda m, x: each(m, x, True)),
    "whole": lambda model, x: checkpoint(lambda x: loop(model, x, lambda m, x: m(x)), x, use_reentrant=False),
    "whole reentrant": lambda model, x: checkpoint(lambda x: loop(model, x, lambda m, x: m(x)), x, use_reentrant=True),
    "nested": lambda model, x: checkpoint(WAYS["each"], model, x, use_reentrant=False),
}
LOOPED = {
    "routing": {"heads": 2, "clusters": 4, "window": 3, "decay": 0.2},
    "performer": {"heads": 2, "redraw_interval": 1},
}


def gradients(model, x, run):
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    run(model, x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOOPED)
def test_a_module_of_a_loop_computes_each_pass_again_as_it_was(name, way):
    torch.manual_seed(0)
    plain, x = build_mixer(name, 16, **LOOPED[name]).train(), torch.randn(2, 12, 16)
    again = copy.deepcopy(plain)
    want = gradients(plain, x, lambda model, x: loop(model, x, lambda m, x: m(x)))
    for got, expected in zip(gradients(again, x, WAYS[way]), want, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", LOOPED)
def test_two_passes_over_the_same_tokens_are_told_apart(name):
    torch.manual_seed(0)
    plain, x = build_mixer(name, 16, **LOOPED[name]).train(), torch.randn(2, 12, 16)
    again = copy.deepcopy(plain)
    want = gradients(plain, x, lambda model, x: model(x) + model(x))
    got = gradients(again, x, lambda model, x: each(model, x, False) + each(model, x, False))
    for one, expected in zip(got, want, strict=True):
        torch.testing.assert_close(one, expected)


def test_a_pass_that_nothing_remembers_is_refused():
    torch.manual_seed(0)
    model = build_mixer("routing", 8, heads=2, clusters=2, window=3).train()
    x = torch.randn(1, 5, 8, requires_grad=True)
    first = each(model, x, False)
    for _ in range(64):
        each(model, torch.randn(1, 5, 8, requires_grad=True), False)
    with pytest.raises(MixerError, match=r"^Routing: checkpointing computes a pass again .* after fewer passes\.$"):
        first.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_pass_of_a_loop_takes_its_own_backend_again(reentrant):
    torch.manual_seed(0)
    model, x = build_mixer("aft_simple", 16, causal=True).train(), torch.randn(2, 12, 16)

    def under(call):
        def run(model, x):
            for name in ("eager", "auto", "eager"):
                with use_backend(name):
                    x = call(model, x)
            return x

        return run

    want = gradients(model, x, under(lambda m, x: m(x)))
    model.zero_grad()
    for got, expected in zip(gradients(model, x, under(lambda m, x: each(m, x, reentrant))), want, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_copy_of_a_module_holds_no_passes():
    torch.manual_seed(0)
    model = build_mixer("routing", 8, heads=2, clusters=2, window=3).train()
    each(model, torch.randn(1, 5, 8, requires_grad=True), False)
    assert len(model._passes._kept) == 1
    assert len(copy.deepcopy(model)._passes._kept) == 0
