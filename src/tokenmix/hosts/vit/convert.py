"""Convert a softmax ViT to a ViT with other mixers: copy matching tensors, initialise the others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import MixerError
from ...mixers import MIXERS, mixer_options
from ...models import ViT, ViTConfig, build_model, find_model
from ...system.files import check_out, new_folder, write_json
from ...system.tensor_files import write_tensors
from ...types import Spec
from ..conversion_report import Entry, Report
from .checkpoints import read_weights
from .read import Weights


def convert_vit(
    source: object, target: object, *, resize: bool = False, classes: int | None = None, seed: int | None = None
) -> tuple[ViT, Report]:
    """Build a ViT with other mixers that takes weights over from ``source`` wherever the two mean the same.

    Everything outside the mixers is copied if the target has it: patches, norms, MLPs, class token, registers,
    positions, head. Of a mixer that replaces another, the projections that both classes name in ``carries`` are
    copied; a layer that keeps its mixer keeps all of it. AFT-conv is as in AFT (Zhai et al. 2021), Table 8:
    "everything but position embedding, class token and the query and key projections". A bias that the target lacks
    is dropped; one that the source lacks is new.

    Args:
        source: as of ``read_weights``.
        target: a ViTConfig; a name of ``MODELS``; or mixer specs, one or one per layer, for the source's own config.
            With a name or specs the model keeps the source's number of classes and LayerNorm eps.
        resize: allow an image size other than the source's; learned positions are then interpolated
            (``ViT.resize``).
        classes: of the new head; a number other than the source's gives a new head.
        seed: of the new weights, which are exactly what ``build_model`` draws under ``torch.manual_seed(seed)``.
            None: torch's generator as it is.

    Returns:
        The model in training mode, and the report.

    Raises:
        MixerError: naming both shapes if a tensor should fit and does not; for another number of layers, width or
            patch; for another image size without ``resize``.
    """
    weights = read_weights(source)
    config = _target_config(target, weights.config, classes)
    notes = [*weights.notes, *_differences(weights.config, config)]
    for name in ("layers", "dim", "patch", "channels"):
        old, new = getattr(weights.config, name), getattr(config, name)
        if old != new:
            raise MixerError(f"convert: {weights.where} has {name}={old}, the target {name}={new}; they must be equal.")
    weights = _resize_weights(weights, config, resize, notes)
    model = _new_model(config, seed)
    state = model.state_dict()
    entries, used = [], set()
    parameters = {name for name, _ in model.named_parameters()}
    for name, tensor in state.items():
        old = _counterpart(name, weights, config)
        status, value = _convert_tensor(name, tensor, old, weights) if old else ("new", None)
        if value is not None:
            tensor.copy_(value)
            used.add(old)
        entries.append(
            Entry(name, status, tuple(tensor.shape), weights.origin.get(old, old) if old else None, name in parameters)
        )
    with torch.device("meta"):
        counted = {name for name, _ in build_model(weights.config).named_parameters()}
    left = [(name, tuple(tensor.shape)) for name, tensor in weights.state.items() if name not in used]
    entries += [Entry(name, "dropped", shape, weights.origin.get(name, name), name in counted) for name, shape in left]
    entries += [Entry(n, "dropped", shape, n) for n, shape in weights.left_out.items()]
    return model, Report(weights.where, _describe_config(config), tuple(entries), tuple(notes))


def _target_config(target: Any, source: ViTConfig, classes: int | None) -> ViTConfig:
    """Return the config of the new model."""
    if isinstance(target, str) and target.lstrip()[:1] in ("{", "["):
        try:
            target = json.loads(target)
        except ValueError as why:
            raise MixerError(f"convert: the mixer spec is not readable JSON ({why}): {target[:80]}") from None
    if isinstance(target, str):
        found = find_model(target)
        if not isinstance(found, ViTConfig):
            raise MixerError(f"convert: {target} is of kind {found.kind!r}; weights of a ViT go into a ViT.")
        target = replace(found, classes=source.classes, norm_eps=source.norm_eps)
    elif isinstance(target, (dict, list, tuple)):
        target = replace(source, mixers=(target,) if isinstance(target, dict) else tuple(target))
    elif not isinstance(target, ViTConfig):
        kind = type(target).__name__
        raise MixerError(f"convert: the target must be a ViTConfig, a name of MODELS or mixer specs, got {kind}.")
    return target if classes is None else replace(target, classes=classes)


def _differences(old: ViTConfig, new: ViTConfig) -> Iterator[str]:
    """Yield notes on options that change the effect of copied weights but not their shapes."""
    if old.norm_eps != new.norm_eps:
        yield f"LayerNorm eps was {old.norm_eps:g}, is {new.norm_eps:g}"
    if old.classes != new.classes:
        yield f"the head is new: {old.classes} classes before, {new.classes} now"
    pairs = [
        (s, t)
        for s, t in zip(old.specs(), new.specs(), strict=False)
        if s["name"] == t["name"] and _options(s) != _options(t)
    ]
    for s, t in {json.dumps(pair, sort_keys=True, default=str): pair for pair in pairs}.values():
        yield f"options of {s['name']} differ: {json.dumps(s)} before, {json.dumps(t)} now"


def _options(spec: Spec) -> Spec:
    """Return a spec with the defaults of its mixer filled in."""
    return (mixer_options(MIXERS[spec["name"]]) if spec["name"] in MIXERS else {}) | spec


def _resize_weights(weights: Weights, config: ViTConfig, resize: bool, notes: list[str]) -> Weights:
    """Return the weights for the target's image size."""
    old = weights.config
    if old.image_size == config.image_size:
        return weights
    sizes = " to ".join(" x ".join(str(n) for n in c.image_size) for c in (old, config))
    if not resize:
        differ = f"{weights.where} is for images of another size than the target, {sizes}"
        raise MixerError(f"convert: {differ}; allow it with resize=True.")
    notes.append(f"resized from images of {sizes}")
    model = weights.model().resize(config.image_size)
    return replace(weights, state=model.state_dict(), config=model.config)


def _new_model(config: ViTConfig, seed: int | None) -> Any:
    if seed is None:
        return build_model(config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(config)


def _counterpart(name: str, weights: Weights, config: ViTConfig) -> str | None:
    """Return the source's tensor that becomes ``name``; None if it is new."""
    if name.startswith("head.") and weights.config.classes != config.classes:
        return None
    if ".mixer." in name:
        _, layer, _, part, *leaf = name.split(".")
        old, new = (c.specs()[int(layer)]["name"] for c in (weights.config, config))
        if old != new:
            part = MIXERS[new].facts.copies.get(part, part)
            if part not in MIXERS[new].facts.carries or part not in MIXERS[old].facts.carries:
                return None
            name = ".".join(["blocks", layer, "mixer", part, *leaf])
    return name if name in weights.state else None


def _convert_tensor(name: str, tensor: Tensor, old: str, weights: Weights) -> tuple[str, Tensor]:
    """Return how the source's tensor becomes ours, and its value."""
    value, origin = weights.state[old], weights.origin.get(old, old)
    if name == "positions" and weights.config.pool == "class" and value.shape[0] == tensor.shape[0] + 1:
        return "split", value[1:]
    if value.shape != tensor.shape:
        shapes = f"{origin!r} has the shape {tuple(value.shape)}, {name} of the target {tuple(tensor.shape)}"
        raise MixerError(f"convert: {weights.where}: {shapes}; they must be equal.")
    return ("split" if list(weights.origin.values()).count(origin) > 1 else "copied"), value


def _describe_config(config: ViTConfig) -> str:
    names = [spec["name"] for spec in config.specs()]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    size = " x ".join(str(n) for n in config.image_size)
    return f"ViT of {config.dim} features, layers {counts}, {config.classes} classes, images of {size}"


def convert_command(
    source: str, target: object, out: Path | str, *, resize: bool = False, classes: int | None = None, seed: int = 0
) -> Report:
    """Write ``convert_vit``'s model to a folder: config.json, model.safetensors and report.json, all three or none.

    A path that holds anything is refused.
    """
    check_out(out)
    model, report = convert_vit(source, target, resize=resize, classes=classes, seed=seed)
    save_converted(model, report, out)
    return report


def save_converted(model: ViT, report: Report, out: Path | str) -> None:
    """Write a converted model's folder, completely or not at all; ``train.load_model`` loads it."""
    check_out(out)
    with new_folder(Path(out)) as folder:
        write_json(folder / "config.json", model.config.to_json())
        write_json(folder / "report.json", report.to_json())
        write_tensors(folder / "model.safetensors", model.state_dict())
