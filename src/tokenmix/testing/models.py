"""Check the promises of whole models: of tokens, from transformers, and of images, from timm."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import MixerError
from ..system.files import read_json
from ..types import Options
from . import model_promises as promises
from .device import on_device
from .loading import one_line
from .model_subject import ModelSubject, model_subject
from .report import BROKEN, ContractError, PromiseReport, Result
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


def open_model(target: str, options: Options) -> tuple[nn.Module, bool]:
    """Open the model that ``hf:FOLDER`` or ``timm:NAME`` names.

    Args:
        options: fields that replace those of a config without weights, or arguments of ``timm.create_model``.

    Returns:
        The model, and whether its weights are random: those of timm are, and those of a folder without weights.

    Raises:
        MixerError: if it cannot be built.
    """
    kind, _, name = target.partition(":")
    torch.manual_seed(0)
    if kind == "timm":
        return _build_timm(name, options), True
    folder = Path(name)
    if any(found for pattern in WEIGHTS for found in folder.glob(pattern)):
        if options:
            given = ", ".join(options)
            raise MixerError(f"check: {folder} has weights, which fix its config; leave {given} out of --options.")
        from ..hosts.surgery.save_load import open_host

        return open_host(target)[0], False
    return _build_from_config(folder, options), True


def _build_timm(name: str, options: Options) -> nn.Module:
    from ..hosts.timm.require import require_timm

    require_timm()
    import timm

    if not timm.is_model(name.split(".")[0]):
        raise MixerError(f"check: timm {timm.__version__} has no model {name!r}; timm.list_models('vit*') lists them.")
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
    except Exception as why:  # options may be anything
        raise MixerError(f"check: timm cannot build {name} with {options}: {one_line(why)}") from why
    return model


def _build_from_config(folder: Path, options: Options) -> nn.Module:
    """Build the model of a config.json of transformers, with random weights."""
    fields = read_json(folder / "config.json")
    if "model_type" not in fields:
        raise MixerError(f"check: {folder / 'config.json'} names no model_type, so it is not a model of transformers.")
    from ..hosts.huggingface.require import check_transformers

    check_transformers()
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        cls: Any = getattr(transformers, str((config.architectures or [None])[0]), None)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    except Exception as why:  # a config may be anything
        raise MixerError(f"check: transformers cannot build the model of {folder}: {one_line(why)}") from why
    return model


def check_model(
    model: nn.Module,
    *,
    promises: Iterable[str] | None = None,
    dtype: torch.dtype | None = None,
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
        dtype: what the copy computes in; by default float64, or float32 if the model does not run in it. Two ways to
            one number may differ by the tolerance of the narrowest dtype of the model's own arithmetic: many compute
            norms and softmax in float32 in any case.
        perturb: add noise to every parameter, for a model with random weights, which differ too little from zero.

    Raises:
        ContractError: with the report and the offending inputs, if any promise is broken.
        MixerError: for a model that is neither, and for an unknown promise.
    """
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    with on_device(str(place)):
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
    with warnings.catch_warnings(), _quiet_transformers():
        warnings.simplefilter("ignore")
        return PromiseReport(s.title, [_check_promise(s, name) for name in chosen])


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers from hints and progress bars inside the block, where it is imported."""
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_promise(s: ModelSubject, name: str) -> Result:
    """Check one promise; where float64 gives numbers that are not finite, float32 decides.

    In float64 the least number of a mask is -inf for a softmax in float32, which makes rows without a key NaN.
    """
    result = try_promise(s, name, MODEL_PROMISES[name], refusals=True)
    if s.dtype == torch.float64 and result.status == BROKEN and "not finite" in result.reason:
        return try_promise(s.copy_to(torch.float32), name, MODEL_PROMISES[name], refusals=True)
    return result
