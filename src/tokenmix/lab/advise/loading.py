"""Load the model to be advised on from its name on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...errors import MixerError
from ...hosts.surgery import find_attention, open_host
from ...models import KINDS, LM, MODELS, ModelConfig, ViT, build_model, config_from_json
from ...system.config import nearest
from ...system.modules import here_on_path
from ...system.torchvision import ensure_torchvision, torchvision_hint
from ...testing.loading import place_of
from ...types import Options, Record
from .inputs import FACTORY, Inputs, inputs_of, own_inputs

FORMS = "a run directory, a folder of transformers, a name of `tokenmix list`, "
FORMS += "a class or model type of transformers, a model of timm, or package:factory"
MEASURED = ("lm", "vit")
"""Kinds of our models that advise can measure."""
EXTRAS = {"transformers": "hf", "timm": "vision"}


@dataclass(frozen=True)
class Host:
    """A model, its name on the command line, the library it belongs to, how it is called, and notes about it.

    ``origin`` is the library as the page names it, such as "transformers".
    ``trained`` is False where it is known that some of its weights are random; the notes say why.
    """

    name: str
    model: nn.Module
    origin: str
    inputs: Inputs
    notes: tuple[str, ...] = ()
    size: int | None = None  # of the images it was built for
    trained: bool = True
    options: Options = field(default_factory=dict)  # of its config, or of its factory


def load_host(name: str, options: Options | None = None, *, device: torch.device | str = "cpu") -> Host:
    """Load the model that ``name`` refers to, in eval mode.

    Args:
        name: a run directory of ours or a folder that `tokenmix convert` wrote; a folder saved by transformers; a name
            of ``MODELS``; a class of transformers (``BertModel``) or a model type (``bert``); a name of timm;
            ``package:factory``, a callable that returns a model, or (model, inputs) with ``inputs(length, batch)``
            returning what the model is called with. A prefix ``hf:`` or ``timm:`` selects the library.
        options: config fields to replace; arguments of the factory. After a change of config the weights are random;
            timing is unaffected.

    Raises:
        MixerError: the model is unknown (the message lists near names), a package is missing (which extra), or a folder
            holds no model.
    """
    options = dict(options or {})
    with torch.random.fork_rng():
        host = _find_model(name, options)
    return replace(host, model=host.model.eval().to(device), options=options)


def host_of(
    model: nn.Module, inputs: Callable[[int, int], object] | None = None, *, device: torch.device | str = "cpu"
) -> Host:
    """Return a module as a host: of this library, transformers or timm, also one changed by hand, or any other.

    Args:
        model: in eval mode, on ``device``.
        inputs: (length, batch) -> what it is called with; None: as models of its library are.

    Raises:
        MixerError: a part is in training mode, it lies elsewhere, or how to call it is not known.
    """
    who = type(model).__name__
    if any(m.training for m in model.modules()):
        raise MixerError(f"advise: the {who} is in training mode; call its eval() first.")
    if (place := next((p.device.type for p in model.parameters()), str(device))) != torch.device(device).type:
        raise MixerError(f"advise: the {who} lies on {place}, and device={str(device)!r} was given; give that device.")
    if inputs is not None:
        return Host(who, model, "module", own_inputs(inputs, model, who))
    origin = "tokenmix" if isinstance(model, (LM, ViT)) else "timm" if hasattr(model, "patch_embed") else "transformers"
    try:
        return Host(who, model, origin, inputs_of(model, who))
    except MixerError as why:
        said = str(why).replace("let the factory return (model, inputs), where", "give inputs=, where")
        raise MixerError(said.replace(FACTORY, "give inputs=")) from None


def _find_model(name: str, options: Options) -> Host:
    prefix, _, rest = name.partition(":")
    if prefix in ("hf", "timm") and rest:
        return (
            _timm(rest, options)
            if prefix == "timm"
            else _folder(Path(rest), options)
            if Path(rest).is_dir()
            else _transformers(rest, options)
        )
    if Path(name).is_dir():
        return _folder(Path(name), options)
    if rest:
        return _factory(name, prefix, rest, options)
    if name in MODELS:
        return _build_ours(name, MODELS[name], options)
    if _has("transformers") and _is_transformers(name):
        return _transformers(name, options)
    if _has("timm") and _is_timm(name):
        return _timm(name, options)
    raise MixerError(_explain_unknown(name))


def _explain_unknown(name: str) -> str:
    """Return what an unknown name could have meant."""
    if "/" in name or os.sep in name:
        return f"advise: there is no folder {name!r}; models are not downloaded, so save the model into a folder first."
    known = [*MODELS]
    missing = [
        f"{package} is not installed (pip install 'tokenmix[{extra}]')"
        for package, extra in EXTRAS.items()
        if not _has(package)
    ]
    if _has("transformers"):
        known += _classes()
    if _has("timm"):
        known += _timm_package().list_models()
    meant = nearest(name, known) if _is_near(name, known) else f"a model is {FORMS}"
    return "; ".join([f"advise: there is no model {name!r}; {meant}", *missing]) + "."


def _is_near(name: str, known: list[str]) -> bool:
    return nearest(name, known).startswith("nearest")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _need(package: str, name: str) -> None:
    if not _has(package):
        raise MixerError(f"advise: {name} needs {package}: pip install 'tokenmix[{EXTRAS[package]}]'.")


def _build_ours(name: str, config: str | ModelConfig, options: Options, note: str = "") -> Host:
    """Build a model of this library with new random weights."""
    model = build_model(config, **options)
    return _our_host(name, model, (note,) if note else ())


def _our_host(name: str, model: Any, notes: tuple[str, ...] = ()) -> Host:
    _check_kind(name, model.config.kind)
    return Host(name, model, "tokenmix", inputs_of(model, name), notes, getattr(model.config, "image_size", (None,))[0])


def _check_kind(name: str, kind: str) -> None:
    if kind not in MEASURED:
        raise MixerError(
            f"advise: {name}: is of kind {kind!r}; of our models, kinds {' and '.join(MEASURED)} are measured."
        )


def _folder(folder: Path, options: Options) -> Host:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise MixerError(
            f"advise: {folder}: holds no config.json; it is no run, no converted model and no folder of transformers."
        ) from None
    except ValueError as why:
        raise MixerError(f"advise: {folder / 'config.json'} is not readable JSON ({why}).") from None
    if not isinstance(config, dict):
        raise MixerError(f"advise: {folder / 'config.json'} holds no JSON object.")
    if config.get("kind") == "surgery":
        return _load_partly_converted(folder, options)
    if str(config.get("model_type")).startswith("tokenmix"):
        raise MixerError(
            f"advise: {folder} was exported from tokenmix; give the run or the model that it was exported from."
        )
    if "model_type" in config:
        return _load_saved(folder, config, options)
    model = config.get("model", config)
    kind = model.get("kind", "lm") if isinstance(model, dict) else None
    if not isinstance(kind, str) or kind not in KINDS or kind in MEASURED and "mixers" not in model:
        raise MixerError(
            f"advise: {folder / 'config.json'} describes neither a model of tokenmix nor one of transformers."
        )
    _check_kind(str(folder), kind)
    if options:
        return _build_ours(
            str(folder),
            config_from_json({"kind": "lm", **model}),
            options,
            "the config was changed, so its weights are random",
        )
    from ..train import load_model

    return _our_host(str(folder), load_model(folder)[0])


def _factory(name: str, package: str, attribute: str, options: Options) -> Host:
    with here_on_path():
        try:
            made = importlib.import_module(package)
        except Exception as why:  # code of the user's can raise any error
            fix = torchvision_hint(why) or (f"; a model is {FORMS}" if isinstance(why, ImportError) else place_of(why))
            raise MixerError(f"advise: {name}: cannot import {package!r} ({_line(why)}){fix}.") from why
        if not callable(getattr(made, attribute, None)):
            raise MixerError(f"advise: {name}: {package} has no callable {attribute!r}.")
        try:
            found = getattr(made, attribute)(**options)
        except Exception as why:  # as above
            said = f"{type(why).__name__}: {_line(why)}{place_of(why)}{torchvision_hint(why)}"
            raise MixerError(f"advise: {name}: calling it with {options or 'nothing'} fails: {said}.") from why
    model, own = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not isinstance(model, nn.Module) or not (own is None or callable(own)):
        raise MixerError(
            f"advise: {name}: must return an nn.Module or (module, inputs(length, batch)), got {type(found).__name__}."
        )
    return Host(name, model, "factory", inputs_of(model, name) if own is None else own_inputs(own, model, name))


def _timm_package() -> ModuleType:
    ensure_torchvision()
    import timm

    return timm


def _is_timm(name: str) -> bool:
    return bool(_timm_package().is_model(name.split(".")[0]))


def _timm(name: str, options: Options) -> Host:
    _need("timm", name)
    timm = _timm_package()
    if not _is_timm(name):
        raise MixerError(f"advise: timm {timm.__version__} has no model {name!r}; {nearest(name, timm.list_models())}.")
    try:
        model = timm.create_model(name, pretrained=False, **options)
    except (TypeError, ValueError, RuntimeError) as why:
        raise MixerError(f"advise: timm cannot build {name} with {options} ({_line(why)}).") from None
    return Host(
        name, model, "timm", inputs_of(model, name), ("its weights are random",), model.default_cfg["input_size"][1]
    )


def _transformers_package() -> ModuleType:
    ensure_torchvision()
    import transformers

    return transformers


def _classes() -> list[str]:
    """Return the names of the model types and classes of transformers."""
    tf = _transformers_package()
    return [*tf.CONFIG_MAPPING, *(n for n in dir(tf) if n.endswith("Model") or "For" in n)]


def _is_transformers(name: str) -> bool:
    tf = _transformers_package()
    if name in tf.CONFIG_MAPPING:
        return True
    return (
        name.isidentifier() and name[0].isupper() and getattr(getattr(tf, name, None), "config_class", None) is not None
    )


def _transformers(name: str, options: Options) -> Host:
    """Build a class or a model type with its default config and random weights."""
    _need("transformers", name)
    tf = _transformers_package()
    if not _is_transformers(name):
        raise MixerError(f"advise: transformers {tf.__version__} has no model {name!r}; {nearest(name, _classes())}.")
    try:
        if name in tf.CONFIG_MAPPING:
            model = tf.AutoModel.from_config(tf.CONFIG_MAPPING[name](**options))
        else:
            cls = getattr(tf, name)
            model = cls(cls.config_class(**options))
    except (TypeError, ValueError, RuntimeError, ImportError) as why:
        raise MixerError(f"advise: transformers cannot build {name} with {options} ({_line(why)}).") from None
    return _their_host(name, model, "its weights are random")


def _load_saved(folder: Path, config: Record, options: Options) -> Host:
    """Load a folder of transformers: the class it names, with its weights if they are there."""
    _need("transformers", str(folder))
    tf = _transformers_package()
    name = (config.get("architectures") or ["AutoModel"])[0]
    cls = getattr(tf, str(name), tf.AutoModel)
    weights = any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin"))
    try:
        if weights and not options:
            model, info = cls.from_pretrained(folder, local_files_only=True, output_loading_info=True)
            lost = sorted(info["missing_keys"])
            count = f"{len(lost)} of its {len(model.state_dict())} weights, such as" if lost else ""
            return _their_host(str(folder), model, *([f"it lacks {count} {lost[0]}, which are random"] if lost else []))
        changed = tf.AutoConfig.from_pretrained(folder, local_files_only=True, **options)
        model = cls.from_config(changed) if cls is tf.AutoModel else cls(changed)
    except Exception as why:  # a damaged file or config can raise any error
        raise MixerError(f"advise: transformers cannot load {folder} ({_line(why)}).") from None
    return _their_host(
        str(folder),
        model,
        f"{'the config was changed' if weights else 'it holds no weights'}, so its weights are random",
    )


def _load_partly_converted(folder: Path, options: Options) -> Host:
    """Load a converted folder that has attention left, to be replaced as well."""
    if options:
        given = ", ".join(options)
        raise MixerError(f"advise: {folder}: was converted, and is measured as it is; leave out {given}.")
    model, host, _ = open_host(str(folder))
    if not find_attention(model):
        was = "its attention was replaced already; advise takes the folder it was converted from"
        raise MixerError(f"advise: {folder} was written by `tokenmix convert`: {was}.")
    if host["library"] == "transformers":
        return _their_host(str(folder), model)
    return Host(str(folder), model, "timm", inputs_of(model, str(folder)))


def _their_host(name: str, model: nn.Module, *random: str) -> Host:
    """Return a model of transformers; ``random`` says why weights of it are, if any."""
    size = getattr(model.config, "image_size", None)
    size = size if isinstance(size, int) else None
    return Host(name, model, "transformers", inputs_of(model, name), random, size, trained=not random)


def _line(why: BaseException) -> str:
    return " ".join(str(why).split())[:200].rstrip(".")
