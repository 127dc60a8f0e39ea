"""Replaced models compile whole, and compiled code stops at a mask that it cannot look into."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgery_models import make, padded
from test_surgery import TIGHT, final
from tokenmix.hosts.surgery import replace_mixers


@pytest.mark.parametrize("spec", ["attention", "aft_simple"])
@pytest.mark.parametrize("name", ["bert", "qwen3", "gpt2", "bart", "clip_vision", "timm"])
@torch.no_grad()
def test_replaced_models_compile_whole(name, spec):
    torch._dynamo.reset()
    new, _ = replace_mixers(make(name, 0.1), spec, seed=0)
    ids, mask = padded("right")
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask} | (
        {"use_cache": False} if name in ("qwen3", "gpt2", "bart") else {}
    )
    given |= {"decoder_input_ids": ids} if name == "bart" else {}
    if name in ("clip_vision", "timm"):
        given = {"x" if name == "timm" else "pixel_values": torch.randn(2, 3, 32, 32)}
    compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
    assert (final(compiled(**given)) - final(new(**given))).abs().max() <= TIGHT


@pytest.mark.parametrize("name", ["llama", "bert"])
@torch.no_grad()
def test_compiled_code_stops_at_a_mask_it_cannot_look_into(name):
    torch._dynamo.reset()
    new, _ = replace_mixers(make(name, 0.1), "attention")
    ids, pairs = padded("right")[0][:1], torch.ones(9, 9, dtype=torch.bool)
    pairs[4:, :4] = pairs[:4, 4:] = False  # two sequences
    whole = torch.ones(9, 9, dtype=torch.bool)
    if name == "llama":
        pairs, whole = pairs.tril(), whole.tril()
    options = {"use_cache": False} if name == "llama" else {}
    compiled = torch.compile(new, backend="aot_eager", fullgraph=True)
    assert (
        final(compiled(ids, attention_mask=whole[None, None], **options))
        - final(new(ids, attention_mask=whole[None, None], **options))
    ).abs().max() <= TIGHT
    assert (
        final(new(ids, attention_mask=pairs[None, None], **options))
        - final(new(ids, attention_mask=whole[None, None], **options))
    ).abs().max() > 0.01
    with pytest.raises(
        RuntimeError, match=r"att.*: gets a mask beyond padding, order and window, which compiled code cannot inspect"
    ):
        compiled(ids, attention_mask=pairs[None, None], **options)
