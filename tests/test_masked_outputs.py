"""Outputs at masked positions may be anything finite: 0 there keeps every promise, NaN does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenmix import functional, reference
from tokenmix.mixers import Attention
from tokenmix.testing import PROMISES, ContractError, check_mixer

PAGE = (Path(__file__).resolve().parents[1] / "docs/contract.md").read_text()
CONCERNED = [name for name in PROMISES if not name.startswith(("compiles", "exports", "options", "refuses", "differ"))]
GIVEN = {"reference": reference.attention, "functional": functional.attention}


class Filled(Attention):
    """Softmax attention that fills in the outputs at masked positions."""

    filling = 0.0
    in_streams_only = False

    def mix(self, inputs):
        y = super().mix(inputs)
        return y if self.in_streams_only else self.fill(y, inputs.key_mask if inputs.context is None else None)

    def mix_chunk(self, x, state, *, positions, key_mask):
        y, after = super().mix_chunk(x, state, positions=positions, key_mask=key_mask)
        return self.fill(y, key_mask), after

    def fill(self, y, key_mask):
        return y if key_mask is None else torch.where(key_mask[..., None], y, self.filling)


class NaNs(Filled):
    filling = float("nan")


class NaNsInStreams(NaNs):
    in_streams_only = True


class MeanOfNothing(Attention):
    """Softmax attention that gives the mean where a context is masked from end to end."""

    def mix(self, inputs):
        context = inputs.context
        mask = inputs.key_mask
        if context is None or mask is None or bool(mask.any()):
            return super().mix(inputs)
        return self.out_proj(self.v_proj(context).mean(1, keepdim=True).expand_as(inputs.x))


@pytest.mark.parametrize("causal", [False, True])
def test_zeros_keep_every_promise(causal):
    check_mixer(Filled, {"heads": 2, "causal": causal}, promises=CONCERNED, **GIVEN)


@pytest.mark.parametrize("promise", ["nothing_to_attend", "equals_reference"])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_breaks_them(promise, causal):
    with pytest.raises(ContractError, match=f"{promise}: .* not finite"):
        check_mixer(NaNs, {"heads": 2, "causal": causal}, promises=[promise], **GIVEN)


def test_nan_in_a_stream_breaks_the_promise_on_streams():
    with pytest.raises(ContractError, match="the output of a stream: .* not finite"):
        check_mixer(NaNsInStreams, {"heads": 2, "causal": True}, promises=["streaming_equals_parallel"], **GIVEN)


def test_a_valid_query_with_nothing_to_attend_gives_out_proj_of_0():
    name = "pairs_with_nothing_to_attend"
    with pytest.raises(ContractError, match=r"over a context that is masked the output is not out_proj\(0\)"):
        check_mixer(MeanOfNothing, {"heads": 2}, promises=[name], **GIVEN)
    check_mixer(Attention, {"heads": 2}, promises=[name])


def test_the_page_says_it_once():
    assert PAGE.count("masked positions") == 1
