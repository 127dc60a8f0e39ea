"""A model with mixers in a folder of its own, and back: config.json, model.safetensors, report.json, the tokenizer's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...system.files import check_out, new_folder, whole_file, write_json
from ...system.torchvision import ensure_torchvision
from ...train.init_from import load_model
from ..conversion_report import Report
from ..vit import checkpoints as files
from ..vit.checkpoints import read_file, read_json
from ..vit.convert import convert_command
from .adapters import adapters_of
from .replace import replace_mixers

BESIDE = ("tokenizer*.json", "vocab.*", "merges.txt", "special_tokens_map.json", "*.model", "preprocessor_config.json", "generation_config.json")
"""Files of a host's folder that are its tokenizer and its defaults, and go along."""


def open_host(source: str) -> tuple[nn.Module, dict[str, Any], Path | None]:
    """A model with its own attention and its weights: of ``timm:NAME`` (downloaded by timm) or of a folder of transformers, also written ``hf:FOLDER``.

    Returns:
        The model in eval mode, how to build it again, and its folder.
    """
    if source.startswith("timm:"):
        model: Any = files.timm_model(source[5:])
        return model.eval(), {"library": "timm", "name": source[5:]}, None
    folder = Path(source.removeprefix("hf:"))
    config = read_json(folder / "config.json")
    transformers = _transformers(str(folder))
    if "model_type" not in config:
        raise MixerError(f"{folder / 'config.json'}: names no model_type; a folder written by transformers' save_pretrained is needed.")
    named = config.get("architectures") or [None]
    cls = getattr(transformers, named[0] or "AutoModel", None)
    if cls is None:
        raise MixerError(f"{folder / 'config.json'}: transformers {transformers.__version__} has no class {named[0]!r}.")
    try:
        model, info = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except (OSError, ValueError, KeyError) as why:
        raise MixerError(f"{folder}: transformers cannot read it ({' '.join(str(why).split())[:200]}).") from None
    lost = sorted(info["missing_keys"])
    if lost:
        raise MixerError(f"{folder}: lacks {len(lost)} of {len(model.state_dict())} weights of its {type(model).__name__}, such as {lost[0]}.")
    return model.eval(), {"library": "transformers", "class": type(model).__name__, "config": model.config.to_dict()}, folder


def convert_any(source: str, target: Any, out: Path | str, *, ours: dict[str, Any], host: dict[str, Any], seed: int) -> tuple[Report, str]:
    """``tokenmix convert``: surgery for patterns and for hosts that are no ViT, else ``convert_vit``. The report, and a line that says how to load the folder.

    Args:
        ours, host: options of ``convert_vit`` and of ``replace_mixers``; those of the other kind must be left alone.
    """
    mixers, surgery = _parsed(target), _is_surgery(source, target)
    defaults: dict[str, Any] = {"resize": False, "classes": None, "last": None, "every": None, "init": "copy"}
    odd = [f"--{name}" for name, value in (ours if surgery else host).items() if value != defaults[name]]
    if odd:
        hint = "is for a ViT of ours, not for a host's own layers" if surgery else "is for a host's own layers; give the target as patterns, '{\"*\": ...}'"
        raise MixerError(f"convert: {', '.join(odd)} {hint}.")
    if surgery:
        return convert_host(source, mixers, out, seed=seed, **host), f"load it: tokenmix.hosts.load_converted({str(out)!r})"
    return convert_command(source, target, out, seed=seed, **ours), f"load it: tokenmix.hosts.load_converted({str(out)!r}), or train it on: --train.init {out}"


def _parsed(target: Any) -> Any:
    """JSON where it is JSON."""
    if not isinstance(target, str) or target.lstrip()[:1] not in ("{", "["):
        return target
    try:
        return json.loads(target)
    except ValueError as why:
        raise MixerError(f"convert: the target is not readable JSON ({why}): {target[:80]}") from None


def _is_surgery(source: str, target: Any) -> bool:
    """Patterns always mean a host's own layers; so does a folder of transformers that holds no ViT."""
    mixers = _parsed(target)
    if isinstance(mixers, dict) and not isinstance(mixers.get("name"), str):
        return True
    path = Path(source.removeprefix("hf:")) / "config.json"
    return path.is_file() and read_json(path).get("model_type", "vit") not in ("vit", "deit")


def convert_host(source: str, mixers: Any, out: Path | str, *, seed: int = 0, **options: Any) -> Report:
    """``replace_mixers`` from a source as of ``open_host`` into a new folder, whole or not at all; options are those of ``replace_mixers``."""
    check_out(out)
    model, host, folder = open_host(source)
    new, report = replace_mixers(model, mixers, seed=seed, **options)
    save_replaced(new, report, out, host=host, beside=folder)
    return report


def save_replaced(model: nn.Module, report: Report, out: Path | str, *, host: dict[str, Any] | None = None, beside: Path | None = None) -> None:
    """Write a model that ``replace_mixers`` gave; ``load_converted`` is the way back.

    Args:
        host: how to build the model before its surgery; a model of transformers says it itself, one of timm needs
            ``{"library": "timm", "name": "vit_tiny_patch16_224", "options": {"num_classes": 10}}``.
        beside: a folder whose tokenizer files go along.
    """
    try:
        from safetensors.torch import save
    except ImportError:
        raise MixerError(f"{out}: writing it needs safetensors: pip install 'tokenmix[train]'.") from None
    check_out(out)
    adapters = {adapter.site.name: adapter.spec for adapter in adapters_of(model).values()}
    config: Any = getattr(model, "config", None)
    if host is None and not hasattr(config, "to_dict"):
        raise MixerError(f"{out}: a {type(model).__name__} cannot be built again from a folder without host=...; torch.save(model.state_dict(), ...) keeps it.")
    host = host or {"library": "transformers", "class": type(model).__name__, "config": config.to_dict()}
    out, tensors = Path(out), _unique_tensors(model)
    with new_folder(out) as folder:
        write_json(folder / "config.json", {"kind": "surgery", "host": host, "mixers": adapters})
        write_json(folder / "report.json", report.to_json())
        for path in () if beside is None else sorted({p for pattern in BESIDE for p in beside.glob(pattern)}):
            shutil.copyfile(path, folder / path.name)
        with whole_file(folder / "model.safetensors") as f:
            f.write(save(tensors))


def _unique_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors, tied ones under their first name only."""
    found, seen = {}, set()
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen or tensor.numel() == 0:
            seen.add(key)
            found[name] = tensor.detach().cpu().contiguous()
    return found


def load_converted(folder: Path | str) -> Any:
    """The model of a folder that ``tokenmix convert`` or ``save_replaced`` wrote, in eval mode.

    Raises:
        MixerError: naming the file, for anything else.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if config.get("kind") != "surgery":
        return load_model(folder)[0]
    with torch.random.fork_rng():
        model, _ = replace_mixers(_empty_host(config["host"], folder), config["mixers"], init="random", inplace=True)
    tensors = read_file(folder / "model.safetensors")
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    own = model.state_dict()
    loaded = {own[name].data_ptr() for name in tensors if name in own}
    lost = [name for name in missing if own[name].data_ptr() not in loaded]  # a tied one is there under its other name
    if lost or unexpected:
        raise MixerError(f"{folder / 'model.safetensors'}: does not fit its config.json: missing {lost[:3]}, unexpected {unexpected[:3]}.")
    return model.eval()


def _empty_host(host: dict[str, Any], folder: Path) -> nn.Module:
    """The host as its class builds it, weights drawn anew."""
    if host.get("library") == "timm":
        try:
            ensure_torchvision()
            import timm
        except ImportError:
            raise MixerError(f"{folder}: holds a model of timm: pip install 'tokenmix[vision]'.") from None
        return timm.create_model(host["name"], pretrained=False, **host.get("options", {}))
    transformers = _transformers(str(folder))
    cls = getattr(transformers, str(host.get("class")), None)
    if cls is None:
        raise MixerError(f"{folder / 'config.json'}: transformers {transformers.__version__} has no class {host.get('class')!r}.")
    given = json.loads(json.dumps(host["config"]))
    config = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
    dtype = getattr(config, "dtype", None)
    model: Any = cls(config)
    return model.to(dtype) if isinstance(dtype, torch.dtype) else model


def _transformers(where: str) -> Any:
    try:
        ensure_torchvision()
        import transformers
    except ImportError:
        raise MixerError(f"{where}: is a model of transformers: pip install 'tokenmix[hf]'.") from None
    return transformers
