"""Load the ViT to be dissected from its name on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from ...errors import MixerError
from ...hosts.surgery.save_load import open_host
from ...models import ViT
from ...system.files import read_json
from ...system.torchvision import ensure_torchvision
from ...types import Record
from .ours import OurViT, our_vit
from .subject import ProbedModel
from .theirs import their_vit

T = TypeVar("T")
FORMS = "a run directory of a ViT, a folder of transformers or timm, or timm:NAME"
HALF = (0.5, 0.5, 0.5)


def open_subject(source: str, *, weights: str | None = None, image_size: int | None = None) -> ProbedModel:
    """Load a ViT.

    Args:
        source: a run directory or converted model of this library; a folder written by transformers' or timm's
            ``save_pretrained``; ``timm:NAME``, with the weights that timm has or downloads.
        weights: of ``timm:NAME``, a checkpoint file to load instead, or "random".
        image_size: side of the images in pixels, a multiple of the patch; None: the model's own.

    Raises:
        MixerError: in one line that says what was given and what would work.
    """
    if weights is not None and not source.startswith("timm:"):
        raise MixerError(f"look tokens: --weights is for timm:NAME; {source} has its own weights.")
    subject = _timm(source[5:], weights) if source.startswith("timm:") else _folder(Path(source.removeprefix("hf:")))
    if image_size is None:
        return subject
    rows, columns = subject.side
    if image_size < 1 or image_size % rows or image_size % columns:
        raise MixerError(f"look tokens: --image-size must be a multiple of the patch, {rows} pixels, got {image_size}.")
    if isinstance(subject, OurViT) and subject.model.fixed_size and subject.image_size != (image_size, image_size):
        own = " x ".join(map(str, subject.image_size))
        raise MixerError(
            f"look tokens: {source} has parameters per position, for images of {own}; leave out --image-size."
        )
    return replace(subject, image_size=(image_size, image_size))


def _folder(folder: Path) -> ProbedModel:
    if not folder.is_dir():
        raise MixerError(f"look tokens: there is no folder {str(folder)!r}; a model is {FORMS}.")
    if not (folder / "config.json").is_file():
        raise MixerError(f"look tokens: {folder} holds no config.json; a model is {FORMS}.")
    config = _call_for_anatomy(read_json, folder / "config.json")
    if "architecture" in config:
        return _timm_folder(folder, config)
    host = config.get("kind") == "surgery"
    if str(config.get("model_type")).startswith("tokenmix") and not host:
        raise MixerError(f"look tokens: {folder} was exported from tokenmix; give the run that it was exported from.")
    if "model_type" in config or host:
        model, _, _ = _call_for_anatomy(open_host, str(folder))
        return their_vit(str(folder), model, *_moments(folder))
    return _load_ours(folder, config)


def _load_ours(folder: Path, config: Record) -> ProbedModel:
    model = config.get("model", config)
    kind = model.get("kind", "lm" if "mixers" in model else None) if isinstance(model, dict) else None
    if kind != "vit":
        what = f"a model of kind {kind!r}" if kind else "no model that is known"
        raise MixerError(f"look tokens: {folder / 'config.json'} describes {what}, not a ViT; a model is {FORMS}.")
    from ..train import load_model

    found, _ = load_model(folder)
    assert isinstance(found, ViT)
    data = config.get("data") if "model" in config else None
    data = data if isinstance(data, dict) else {}
    subject = our_vit(str(folder), found, data.get("mean"), data.get("std"))
    return replace(subject, run_dir=folder if data else None)


def _timm(name: str, weights: str | None) -> ProbedModel:
    if weights is None:
        model, _, _ = _call_for_anatomy(open_host, f"timm:{name}")
        return their_vit(f"timm:{name}", model, *_timm_moments(model), [])
    file = None if weights == "random" else weights
    if file is not None and not Path(file).is_file():
        raise MixerError(f"look tokens: --weights {weights}: there is no such file; give a checkpoint, or random.")
    model = _build_timm(f"timm:{name}", name, checkpoint_path=file or "")
    return their_vit(f"timm:{name}", model, *_timm_moments(model), ["its weights are random"] if file is None else [])


def _timm_folder(folder: Path, config: Record) -> ProbedModel:
    model = _build_timm(str(folder), f"local-dir:{folder}", pretrained=True)
    return their_vit(str(folder), model, *_timm_moments(model), [])


def _build_timm(shown: str, name: str, **options: Any) -> nn.Module:
    """Build a model of timm, or say in one line why that fails."""
    try:
        ensure_torchvision()
        import timm
    except ImportError:
        raise MixerError(f"look tokens: {shown} needs timm: pip install 'tokenmix[vision]'.") from None
    if not name.startswith("local-dir:") and not timm.is_model(name.split(".")[0]):
        raise MixerError(
            f"look tokens: {shown}: timm {timm.__version__} has no such model; timm.list_models() lists them."
        )
    try:
        return timm.create_model(name, **options)
    except Exception as why:  # a damaged file or config can raise any error
        line = " ".join(str(why).split())[:200].rstrip(".")
        raise MixerError(f"look tokens: timm cannot load {shown} ({line}).") from None


def _timm_moments(model: nn.Module) -> tuple[tuple[float, ...], tuple[float, ...]]:
    given = getattr(model, "pretrained_cfg", None) or {}
    return tuple(given.get("mean", HALF)), tuple(given.get("std", HALF))


def _moments(folder: Path) -> tuple[tuple[float, ...], tuple[float, ...], list[str]]:
    """Return means and deviations of a folder of transformers, and what was assumed."""
    try:
        given = json.loads((folder / "preprocessor_config.json").read_text())
        return tuple(given["image_mean"]), tuple(given["image_std"]), []
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        note = "it has no preprocessor_config.json with image_mean and image_std; 0.5 is assumed for both"
        return HALF, HALF, [note]


def _call_for_anatomy(function: Callable[..., T], *args: object) -> T:
    """Call a function whose errors do not say that anatomy asked."""
    try:
        return function(*args)
    except MixerError as why:
        raise MixerError(f"look tokens: {why}") from None
