"""Read weights from a model, a state dict, a file, a run, a converted model, timm or a Hugging Face folder."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import MAEConfig, ViT, ViTConfig
from ...models.saved import read_run
from ...system.files import read_json
from ...system.tensor_files import read_tensors
from ...system.torchvision import ensure_torchvision
from ...types import Options
from .names import refuse_distilled, strip_model_name
from .read import Weights, from_hf, from_own, from_timm

TORCH_FILES = (".pth", ".pt", ".bin", ".tar")
KINDS = ".safetensors, " + ", ".join(TORCH_FILES)


def read_weights(source: object, *, heads: int | None = None, image_size: int | Sequence[int] | None = None) -> Weights:
    """Read the weights of a ViT under our names, and its config.

    Args:
        source: a ViT of ours, of timm or of transformers; a state dict of timm or transformers;
            ``(state, ViTConfig)``; ``"timm:NAME"`` (downloaded by timm); ``"hf:FOLDER"``; or a path: a .safetensors,
            .pth, .pt or .bin file, a folder of transformers, a run directory, a converted model's folder.
        heads, image_size: of a bare state dict or file, if not 64 features per head and a square image.

    Raises:
        MixerError: naming the file, and the first key that does not belong to a plain ViT.
    """
    guess = {"heads": heads, "image_size": image_size}
    if isinstance(source, Weights):
        return source
    if isinstance(source, (str, Path)):
        return _read_place(str(source), guess)
    if isinstance(source, ViT):
        return from_own(source)
    if isinstance(source, tuple) and len(source) == 2:
        return from_own(*source, where="the state dict")
    if isinstance(source, nn.Module):
        return from_hf(source) if _kind(source.state_dict(), "the model") == "hf" else from_timm(source)
    if isinstance(source, Mapping):
        return _from_state(source, "the state dict", guess)
    raise MixerError(f"expects a model, a state dict, (state, ViTConfig) or a path, got {type(source).__name__}.")


def read_file(path: Path | str) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors or torch file; of a training checkpoint, those in "model" or "state_dict"."""
    path = Path(path)
    if not path.is_file():
        raise MixerError(f"{path}: there is no such file.")
    if path.suffix == ".safetensors":
        return read_tensors(path)
    if path.suffix not in TORCH_FILES:
        ending = path.suffix or "a file without an extension"
        raise MixerError(f"{path}: weights are read from {KINDS}, not from {ending}.")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as why:
        raise MixerError(f"{path}: is truncated, or holds more than tensors ({_line(why)}).") from None
    except Exception as why:  # a damaged pickle can raise any error
        raise MixerError(f"{path}: is truncated or not a PyTorch file ({_line(why)}).") from None
    for name in ("model", "state_dict"):
        if isinstance(found, Mapping) and isinstance(found.get(name), Mapping):
            found = found[name]
    if (
        not isinstance(found, Mapping)
        or not found
        or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in found.items())
    ):
        raise MixerError(f"{path}: holds no state dict, neither at the top level nor under 'model' or 'state_dict'.")
    return dict(found)


def _line(why: BaseException) -> str:
    return " ".join(str(why).split())[:160]


def _kind(state: Mapping[str, Tensor], where: str) -> str:
    """Return whose names these are, "own", "timm" or "hf"; refuse a checkpoint of another architecture."""
    refuse_distilled(state, where)
    keys = {strip_model_name(key) for key in state}
    for kind, sign in (
        ("own", "patch.weight"),
        ("timm", "patch_embed.proj.weight"),
        ("hf", "embeddings.patch_embeddings.projection.weight"),
    ):
        if sign in keys:
            return kind
    first = next(iter(state), None)
    raise MixerError(
        f"{where}: is not a checkpoint of a ViT of timm, transformers or tokenmix; its first key is {first!r}."
    )


def _from_state(state: Mapping[str, Tensor], where: str, guess: Options, config: Any = None) -> Weights:
    kind = _kind(state, where)
    if kind == "own":
        return from_own(state, config, where=where)
    return (
        from_timm(state, where=where, **guess)
        if kind == "timm"
        else from_hf(state, where=where, config=config, **guess)
    )


def _read_place(place: str, guess: Options) -> Weights:
    if place.startswith("timm:"):
        return from_timm(timm_model(place[5:]), where=place)
    path = Path(place.removeprefix("hf:"))
    if not path.exists():
        hint = "download the model into a folder first"
        if not place.startswith("hf:"):
            hint = f"a file ({KINDS}), a folder, timm:NAME or hf:FOLDER is read"
        raise MixerError(f"{place}: there is no such file or folder; {hint}.")
    return _from_folder(path, guess) if path.is_dir() else _from_state(read_file(path), str(path), guess)


def timm_model(name: str) -> nn.Module:
    """Load a model of timm with its published weights."""
    try:
        ensure_torchvision()
        import timm
    except ImportError:
        raise MixerError(f"timm:{name}: needs timm: pip install 'tokenmix[vision]'.") from None
    if not timm.is_model(name.split(".")[0]):
        have = f"timm {timm.__version__} has no such model"
        raise MixerError(f"timm:{name}: {have}; timm.list_models('deit*') lists them.")
    try:
        return timm.create_model(name, pretrained=True)
    except (RuntimeError, OSError, ValueError) as why:
        raise MixerError(f"timm:{name}: its weights could not be loaded ({_line(why)}).") from None


def _from_folder(folder: Path, guess: Options) -> Weights:
    """Read a run directory, a converted model or a model saved by transformers, depending on config.json."""
    config = read_json(folder / "config.json")
    if "model_type" in config and config.get("kind") != "surgery":
        found = next(
            (folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()), None
        )
        if found is None:
            raise MixerError(f"{folder}: holds neither model.safetensors nor pytorch_model.bin, in one piece.")
        return from_hf(read_file(found), config=config, where=str(found), **guess)
    run = "model" in config
    model = config["model"] if run else config
    pretrained = isinstance(model, dict) and run and model.get("kind") == "mae"
    if not pretrained and (not isinstance(model, dict) or model.get("kind") != "vit"):
        kind = model.get("kind") if isinstance(model, dict) else None
        needed = "a Vision Transformer, kind 'vit', is needed"
        raise MixerError(f"{folder / 'config.json'}: describes a model of kind {kind!r}; {needed}.")
    vit = MAEConfig.from_json(model).encoder if pretrained else ViTConfig.from_json(model)
    if not run:
        return from_own(read_file(folder / "model.safetensors"), vit, where=str(folder / "model.safetensors"))
    _, state, step = read_run(folder)
    if pretrained:  # of a masked autoencoder, the encoder
        state = {name.removeprefix("encoder."): t for name, t in state.items() if name.startswith("encoder.")}
    return from_own(state, vit, where=f"{folder} (step {step})")
