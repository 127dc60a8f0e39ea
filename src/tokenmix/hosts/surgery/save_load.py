"""Save a model with mixers in a folder, and load it: config.json, model.safetensors, report.json, tokenizer files."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from ...errors import MixerError
from ...models.saved import load_model
from ...system.deprecation import warn_deprecated
from ...system.files import check_out, new_folder, read_json, write_json
from ...system.tensor_files import write_tensors
from ...system.torchvision import ensure_torchvision
from ...types import Options, Record
from ..conversion_report import REPORT, Report
from ..vit import checkpoints as files
from ..vit.checkpoints import read_file
from ..vit.convert import convert_command
from .adapters import adapters_of, check_described
from .replace import replace_mixers
from .side_files import copy_side_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

HOST = "tokenmix_host"
"""The attribute in which a loaded model of timm remembers how to build its host again."""


def open_host(source: str) -> tuple[nn.Module, Record, Path | None]:
    """Load a model with its own attention and weights.

    Args:
        source: ``timm:NAME``, which timm downloads, or a folder of transformers, optionally as ``hf:FOLDER``. A
            converted folder is one too: its model keeps the mixers that it has.

    Returns:
        The model in eval mode, how to build it again, and its folder.
    """
    if source.startswith("timm:"):
        model: Any = files.timm_model(source[5:])
        return model.eval(), {"library": "timm", "name": source[5:]}, None
    folder = Path(source.removeprefix("hf:"))
    config = read_json(folder / "config.json")
    transformers = _transformers(str(folder))
    if config.get("kind") == "surgery":
        model = load_converted(folder)
        return model, getattr(model, HOST, None) or _describe_host(model), folder
    if "model_type" not in config:
        needed = "a folder written by transformers' save_pretrained is needed"
        raise MixerError(f"{folder / 'config.json'}: names no model_type; {needed}.")
    named = config.get("architectures") or [None]
    cls = getattr(transformers, str(named[0] or "AutoModel"), None)
    if cls is None:
        have = f"transformers {transformers.__version__} has no class {named[0]!r}"
        raise MixerError(f"{folder / 'config.json'}: {have}.")
    try:
        model, info = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    except Exception as why:  # a damaged file or config can raise any error
        raise MixerError(f"{folder}: transformers cannot read it ({_line(why)}).") from None
    lost = sorted(info["missing_keys"])
    if lost:
        count = f"{len(lost)} of {len(model.state_dict())} weights of its {type(model).__name__}"
        raise MixerError(f"{folder}: lacks {count}, such as {lost[0]}.")
    return model.eval(), _describe_host(model), folder


def _describe_host(model: Any) -> Record:
    """Describe how to build a model of transformers, with the data type of its weights."""
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    return {"library": "transformers", "class": type(model).__name__, "config": config}


def convert_any(
    source: str, target: Any, out: Path | str, *, ours: Options, host: Options, seed: int
) -> tuple[Report, str]:
    """Run ``tokenmix convert``: surgery for patterns and for hosts other than ViTs, else ``convert_vit``.

    Args:
        ours, host: options of ``convert_vit`` and of ``replace_mixers``; those not in use must keep their defaults.

    Returns:
        The report, and a line that says how to load the folder.
    """
    mixers, surgery = _parse_target(target), _is_surgery(source, target)
    defaults: Options = {"resize": False, "classes": None, "last": None, "every": None, "init": "copy"}
    odd = [f"--{name}" for name, value in (ours if surgery else host).items() if value != defaults[name]]
    if odd:
        if surgery:
            hint = "is for a ViT of ours, not for a host's own layers"
        else:
            hint = "is for a host's own layers; give the target as patterns, '{\"*\": ...}'"
        raise MixerError(f"convert: {', '.join(odd)} {hint}.")
    load = f"load it: tokenmix.hosts.load_converted({str(out)!r})"
    if surgery:
        return convert_host(source, mixers, out, seed=seed, **host), load
    report = convert_command(source, target, out, seed=seed, **ours)
    return report, f"{load}, or train it further: --train.init {out}"


def _parse_target(target: object) -> Any:
    """Parse a target that is JSON; return any other as it is."""
    if not isinstance(target, str) or target.lstrip()[:1] not in ("{", "["):
        return target
    try:
        return json.loads(target)
    except ValueError as why:
        raise MixerError(f"convert: the target is not readable JSON ({why}): {target[:80]}") from None


def _is_surgery(source: str, target: object) -> bool:
    """Return whether the target needs surgery.

    Patterns always name a host's own layers; a folder of transformers that holds no ViT needs surgery too, and so does
    a converted one.
    """
    mixers = _parse_target(target)
    if isinstance(mixers, dict) and not isinstance(mixers.get("name"), str):
        return True
    path = Path(source.removeprefix("hf:")) / "config.json"
    config = read_json(path) if path.is_file() else {}
    return config.get("kind") == "surgery" or config.get("model_type", "vit") not in ("vit", "deit")


def convert_host(source: str, mixers: Any, out: Path | str, *, seed: int = 0, **options: Any) -> Report:
    """Apply ``replace_mixers`` to a source of ``open_host`` and write a new folder, completely or not at all.

    ``options`` are those of ``replace_mixers``.
    """
    check_out(out)
    model, host, folder = open_host(source)
    new, report = replace_mixers(model, mixers, seed=seed, **options)
    save_replaced(new, out, report, host=host, beside=folder)
    return report


def save_replaced(
    model: nn.Module,
    out: Path | str,
    report: Report | None = None,
    *,
    host: Record | None = None,
    beside: Path | str | None = None,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
) -> None:
    """Write a model made by ``replace_mixers``; ``load_converted`` loads it.

    Everything in the folder that the model came from is copied along, but weights, what training left, and
    ``config.json``: the files of tokenizer, processor and generation, chat templates, those of sentence-transformers.

    Args:
        report: what ``replace_mixers`` returned, for ``read_report``.
        host: how to build the original model; a model of transformers describes itself, and so does one that
            ``load_converted`` loaded; one of timm needs
            ``{"library": "timm", "name": "vit_tiny_patch16_224", "options": {"num_classes": 10}}``. A model of your own
            is not written: save its ``state_dict()``.
        beside: the folder whose files are copied along; None: the folder that transformers or ``load_converted`` loaded
            the model from, where there is one.
        tokenizer: a tokenizer or processor of transformers that is saved with the model, instead of these files.
    """
    if isinstance(out, Report):  # the order of arguments before 0.3
        warn_deprecated(
            "save_replaced(model, report, folder)", "save_replaced(model, folder, report)", removed_in="0.4"
        )
        out, report = cast("tuple[str, Report]", (report, out))
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    check_described(out, model)
    adapters = {adapter.site.name: adapter.spec for adapter in adapters_of(model).values()}
    host = _check_host(model, host, out)
    check_out(out)
    loaded_from = getattr(getattr(model, "config", None), "_name_or_path", "")
    if beside is None and loaded_from and Path(loaded_from).is_dir():
        beside = loaded_from
    out, tensors = Path(out), model.state_dict()
    if odd := [name for name, tensor in tensors.items() if not is_plain(tensor)]:
        fix = "save the model before it is quantised"
        if isinstance(tensors[odd[0]], torch.Tensor) and not tensors[odd[0]].is_quantized:  # split over processes
            gather = "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True"
            fix = f"gather it by {gather}, and model.save_pretrained(FOLDER, state_dict=...)"
        raise MixerError(f"{out}: {odd[0]} is no plain tensor but a {type(tensors[odd[0]]).__name__}; {fix}.")
    if any(tensor.is_meta for tensor in tensors.values()):
        raise MixerError(f"{out}: the model is on the meta device and has no weights to write; load them first.")
    with new_folder(out) as folder:
        if beside is not None:
            copy_side_files(Path(beside), folder)
        described = {"kind": "surgery", "host": host, "mixers": adapters}
        if host.get("library") == "transformers":
            from .converted_config import converted_json

            described = converted_json(host["config"], adapters, host["class"]) | {"weights": "by module"}
        write_json(folder / "config.json", described)
        if report is not None:
            write_json(folder / REPORT, report.to_json())
        if getattr(model, "generation_config", None) is not None:
            _write_defaults(model, folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_tensors(folder / "model.safetensors", tensors)


def is_plain(tensor: object) -> bool:
    """Return whether a value of a state dict is an ordinary tensor: not quantised, and not split over processes."""
    return type(tensor) in (torch.Tensor, nn.Parameter) and not cast(torch.Tensor, tensor).is_quantized


def _write_defaults(model: Any, folder: Path) -> None:
    """Write the defaults of ``generate``, unless they contradict each other."""
    try:
        model.generation_config.save_pretrained(folder)
    except ValueError as why:
        raise MixerError(f"model.generation_config cannot be saved: {_line(why)}.") from None


def _check_host(model: Any, host: Record | None, out: Path | str) -> Record:
    """Return how to build the host of a model again, or refuse a model for which nobody knows."""
    host = host or getattr(model, HOST, None)
    if host is None and not hasattr(getattr(model, "config", None), "to_dict"):
        raise MixerError(
            f"{out}: a folder holds models of transformers and timm, which can be built from it, not a "
            f"{type(model).__name__}; torch.save(model.state_dict(), FILE) keeps its weights, which "
            "model.load_state_dict(torch.load(FILE)) takes after the same replace_mixers of a new model."
        )
    if host is not None and host.get("library") not in ("timm", "transformers"):
        library = host.get("library")
        raise MixerError(f"{out}: host['library'] must be 'timm' or 'transformers', got {library!r}.")
    return host or _describe_host(model)


def load_converted(folder: Path | str) -> Any:
    """Load the model of a folder that ``tokenmix convert`` or ``save_replaced`` wrote, in eval mode.

    Folders that ``save_pretrained`` or a Trainer wrote of such a model are loaded as well.

    Raises:
        MixerError: for any other folder, naming the file.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json")
    if "model_type" in config and config.get("kind") != "surgery":
        raise MixerError(f"{folder} is a folder of transformers, whose attention `tokenmix convert` replaces first.")
    if config.get("kind") != "surgery":
        return load_model(folder)[0]
    if "model_type" in config and config.get("weights") != "by module":  # save_pretrained renames and splits them
        _transformers(str(folder))
        from .auto_classes import load_saved

        return load_saved(folder)
    tensors = read_file(folder / "model.safetensors")
    model = _load_by_module(folder, config, tensors)
    if config["host"].get("library") == "timm":
        setattr(model, HOST, config["host"])
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = _transformers(str(folder)).GenerationConfig.from_pretrained(folder)
    if hasattr(model, "name_or_path"):
        model.name_or_path = model.config._name_or_path = str(folder)  # as transformers does: the tokenizer lies there
    return model.eval()


def _load_by_module(folder: Path, config: Record, tensors: dict[str, torch.Tensor]) -> Any:
    """Build a host with its mixers, and give it weights that have the names of its modules."""
    try:
        with torch.random.fork_rng():
            model, _ = replace_mixers(
                _empty_host(config["host"], folder), config["mixers"], init="random", inplace=True
            )
    except MixerError:
        raise
    except Exception as why:  # libraries raise errors of any type for a damaged config
        reason = f"{type(why).__name__}: {_line(why)}"
        raise MixerError(f"{folder / 'config.json'}: describes no model that can be built ({reason}).") from None
    for name, own in (*model.named_parameters(), *model.named_buffers()):
        if name in tensors and own.dtype != tensors[name].dtype:
            own.data = own.data.to(tensors[name].dtype)  # the weights decide, not the config
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as why:
        reason = _line(why)
        raise MixerError(f"{folder / 'model.safetensors'}: does not fit its config.json: {reason}.") from None
    own_state = model.state_dict()
    loaded = {own_state[name].data_ptr() for name in tensors if name in own_state}
    # a tied tensor is present under its other name
    lost = [name for name in missing if own_state[name].data_ptr() not in loaded]
    if lost or unexpected:
        differ = f"missing {lost[:3]}, unexpected {unexpected[:3]}"
        raise MixerError(f"{folder / 'model.safetensors'}: does not fit its config.json: {differ}.")
    if odd := [n for n, t in tensors.items() if not torch.equal(own_state[n], t) and not t.isnan().any()]:
        tied = "its config ties it to another one, so the file holds two tensors for one"
        raise MixerError(f"{folder / 'model.safetensors'}: {odd[0]}: {tied}; set tie_word_embeddings there to false.")
    return model


def _line(why: BaseException) -> str:
    return " ".join(str(why).split())[:200].rstrip(".")


def _empty_host(host: Record, folder: Path) -> nn.Module:
    """Build the host from its class, with random weights."""
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
        have = f"transformers {transformers.__version__} has no class {host.get('class')!r}"
        raise MixerError(f"{folder / 'config.json'}: {have}.")
    return cls._from_config(_their_config(transformers, host["config"]))  # in the config's data type


def _their_config(transformers: ModuleType, given: Record) -> PreTrainedConfig:
    """Build a config of transformers from its JSON, which stays as it is."""
    given = json.loads(json.dumps(given))
    return transformers.AutoConfig.for_model(given.pop("model_type"), **given)


def host_config(folder: Path) -> PreTrainedConfig:
    """Return the config of transformers of a host's folder, converted or not."""
    config = read_json(folder / "config.json")
    given = config["host"].get("config") if config.get("kind") == "surgery" else config
    if not isinstance(given, dict) or "model_type" not in given:
        raise MixerError(f"{folder / 'config.json'}: describes no model of transformers, so it has no tokenizer.")
    return _their_config(_transformers(str(folder)), given)


def _transformers(where: str) -> ModuleType:
    try:
        ensure_torchvision()
        import transformers
    except ImportError:
        raise MixerError(f"{where}: is a model of transformers: pip install 'tokenmix[hf]'.") from None
    return transformers
