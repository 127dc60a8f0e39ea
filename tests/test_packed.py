"""Packed sequences of very different lengths: each as if alone, and not all of them padded to the longest."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tokenmix import build_mixer

LENGTHS = [3, 900, 5, 0, 70, 130, 1, 0, 129, 64, 700, *[2] * 40]


@pytest.mark.parametrize("name", ["attention", "aft_simple", "aft_local"])
def test_each_is_as_alone_and_padding_is_at_most_twice_the_tokens(name):
    torch.manual_seed(0)
    options = {"attention": {"heads": 2}, "aft_simple": {}, "aft_local": {"max_len": 900, "window": 5}}[name]
    mixer = build_mixer(name, 8, causal=True, **options)
    x, ends = torch.randn(sum(LENGTHS), 8), torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    with mock.patch.object(mixer, "forward", wraps=mixer.forward) as spy:
        packed = mixer.forward_packed(x, ends)
    longest = [call.args[0].shape[1] for call in spy.call_args_list]
    assert sorted(longest) == [64, 70, 130, 900]
    assert sum(call.args[0].shape[:2].numel() for call in spy.call_args_list) < 2 * sum(LENGTHS) + 64 * sum(
        n <= 64 for n in LENGTHS
    )
    for part, alone in zip(packed.split(LENGTHS), x.split(LENGTHS), strict=True):
        assert len(alone) == 0 or torch.allclose(part, mixer(alone[None])[0], atol=1e-6)
    torch.autograd.grad(packed.square().sum(), list(mixer.parameters()))


def test_sequences_of_one_length_need_no_mask():
    mixer = build_mixer("aft_simple", 8)
    x = torch.randn(30, 8)
    with mock.patch.object(mixer, "forward", wraps=mixer.forward) as spy:
        y = mixer.forward_packed(x, torch.arange(0, 31, 10, dtype=torch.int32))
    assert spy.call_args.kwargs == {"key_mask": None}
    assert torch.allclose(y, mixer(x.view(3, 10, 8)).flatten(0, 1), atol=1e-6)
