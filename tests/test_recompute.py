"""Test what checkpointing computes again, beside what the contract promises of every mixer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tokenmix import build_mixer
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
