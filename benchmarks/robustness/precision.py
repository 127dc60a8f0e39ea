"""Mixing under autocast, whose rounding belongs to the projections alone."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

import tokenmix
from tokenmix.mixers import Inputs

from . import attempt

ROWS = {
    "local": {"window": 3},
    "strided": {"stride": 3},
    "fixed": {"stride": 4, "columns": 2},
    "longformer": {"window": 2},
    "bigbird": {"block": 2},
}
MORE = {
    "external": {"slots": 5},
    "synthesizer_dense": {"max_len": 16},
    "transformer_xl": {},
    "lambda": {"max_len": 16, "key_width": 3},
    "reformer": {},
}


@attempt("8", "The pattern mixers under float16 autocast")
def patterns_in_half() -> str:
    """Their maxima were cut at -1e30, which float16 does not hold."""
    said = {}
    for name, options in ROWS.items():
        mixer, x = tokenmix.build_mixer(name, 16, heads=4, **options), torch.randn(2, 16, 16)
        try:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
                said[name] = "finite" if mixer(x).isfinite().all() else "not finite"
        except RuntimeError as error:
            said[name] = type(error).__name__
    return ", ".join(f"{name} {what}" for name, what in said.items())


@attempt("8", "Scores under bfloat16 autocast against float32 ones of the same projections, large logits")
def scores_in_bfloat16() -> str:
    """The largest difference, in units of bfloat16's rounding of the output."""
    worst = {}
    for name, options in {**ROWS, **MORE}.items():
        torch.manual_seed(0)
        heads = {"heads": 4} if "heads" in tokenmix.mixers.mixer_options(tokenmix.MIXERS[name]) else {}
        mixer, x = tokenmix.build_mixer(name, 16, **heads, **options).eval(), 8 * torch.randn(2, 16, 16)
        form = mixer.facts.functional_form()
        with torch.no_grad():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                args, given = mixer.functional_args(Inputs(x))
                got = form(*args, **given).float()
            wide = pytree.tree_map_only(torch.Tensor, lambda a: a.float() if a.is_floating_point() else a, args)
            want = form(*wide, **given)
        worst[name] = float((got - want).abs().max() / want.abs().max()) / torch.finfo(torch.bfloat16).eps
    return ", ".join(f"{name} {off:.1f}" for name, off in worst.items())
