"""Check the promises of whole models: of tokens, from transformers, and of images, from timm."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import MixerError
from ..hosts.surgery.save_load import open_host
from ..system.config import nearest
from ..system.files import read_json
from ..types import Options
from . import model_promises as promises
from .loading import one_line
from .model_subject import ModelSubject, model_subject
from .report import ContractError, PromiseReport
from .suite import try_promise

MODEL_PROMISES = {
    f.__name__: f
    for f in (
        promises.left_padding,
        promises.right_padding,
        promises.interior_padding,
        promises.decodes_after_left_padding,
        promises.decode_equals_parallel,
        promises.prefill_in_any_cuts,
        promises.beams_reorder,
        promises.packed_by_positions,
        promises.packed_by_lengths,
        promises.no_look_into_the_future,
        promises.rows_are_independent,
        promises.same_twice,
        promises.gradients_are_finite,
        promises.gradients_at_large_biases,
        promises.saves_and_loads,
        promises.finite_in_bfloat16,
    )
}
"""The promises of whole models, in the order of checking. The docstring of each states the promise."""
WEIGHTS = ("*.safetensors", "*.bin")


def check_model(
    model: nn.Module,
    *,
    promises: Iterable[str] | None = None,
    dtype: torch.dtype = torch.float64,
    perturb: bool = False,
    seed: int = 0,
) -> PromiseReport:
    """Check the promises of a whole model: of tokens of transformers, or of images of timm.

    Inputs are random tokens, or images, the smallest first, so the first that breaks a promise is the smallest. Masks
    and positions are those that transformers' ``generate`` gives. An error that the model raises by itself is a
    refusal: the promise is "refused", and the report quotes it.

    Args:
        model: is copied, and left as it is.
        promises: names of ``MODEL_PROMISES``, to check only those.
        dtype: what the copy computes in. Two ways to one number may differ by what the tree's table allows for the
            narrowest dtype of the model's own arithmetic, such as norms in float32.
        perturb: add noise to every parameter, for a model with random weights, which differ too little from zero.

    Raises:
        ContractError: with the report and the offending inputs, if any promise is broken.
        MixerError: for a model that is neither, and for an unknown promise.
    """
    report = run_model_promises(model_subject(model, dtype=dtype, seed=seed, perturb=perturb), promises)
    if report.failures:
        raise ContractError(report)
    return report


def run_model_promises(s: ModelSubject, names: Iterable[str] | None = None) -> PromiseReport:
    """Check the named promises, or all, and return the report; broken promises do not raise."""
    chosen = list(MODEL_PROMISES) if names is None else list(names)
    for name in chosen:
        if name not in MODEL_PROMISES:
            raise MixerError(f"check: no promise of models is called {name!r}; known: {', '.join(MODEL_PROMISES)}.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PromiseReport(s.title, [try_promise(s, n, MODEL_PROMISES[n], refusals=True) for n in chosen])
