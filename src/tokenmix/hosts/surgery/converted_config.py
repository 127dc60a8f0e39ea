"""Describe a model of transformers whose attention was replaced in its config.json. Needs transformers."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from transformers.configuration_utils import PreTrainedConfig

from ...errors import MixerError
from ...types import Record, Spec
from .adapters import adapters_of, site_name

CONVERTED = "tokenmix.hosts.load_converted"
"""The model_type in the config.json of such a folder: where nobody has registered it, transformers refuses it by this
name, which says what opens the folder."""
BEFORE = "tokenmix_converted"
"""The same in folders of version 0.2."""
NOTE = "attention was replaced by tokenmix; tokenmix.hosts.load_converted(folder) opens it"
HOST, MIXERS_KEY = "host", "mixers"


class ConvertedConfig(PreTrainedConfig):
    """Hold the config of a host and the mixers in it, as ``AutoConfig`` reads them from a folder.

    It has none of the host's own fields, so that no class of transformers builds the host without its mixers from it.

    Args:
        host: the host's own config, as an object or as JSON.
        mixers: name of a replaced module -> its mixer's spec.
    """

    model_type = CONVERTED

    def __init__(self, host: PreTrainedConfig | None = None, mixers: dict[str, Spec] | None = None, **kwargs: Any):
        self.host, self.mixers = host, mixers or {}
        super().__init__(**kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the config of a converted model has no {name!r}: {NOTE}")

    @classmethod
    def from_dict(cls, config_dict: Record, **kwargs: Any) -> Any:
        """Read a config.json; other arguments replace fields of the host's config."""
        found, mixers = config_dict.get(HOST), config_dict.get(MIXERS_KEY)
        given = copy.deepcopy(found.get("config")) if isinstance(found, dict) else None
        if not isinstance(given, dict) or "model_type" not in given or not isinstance(mixers, dict):
            raise MixerError(f"config.json: model_type is {CONVERTED!r}, but host and mixers are not described in it.")
        from transformers import AutoConfig

        unused, kind = kwargs.pop("return_unused_kwargs", False), type(AutoConfig.for_model(given["model_type"]))
        host, rest = kind.from_dict(given, return_unused_kwargs=True, **kwargs)
        config = cls(host, mixers, architectures=config_dict.get("architectures"))
        for name in ("id2label", "label2id"):
            setattr(config, name, getattr(host, name))
        return (config, rest) if unused else config

    def to_dict(self) -> Record:
        """Return the content of config.json."""
        config = self.host.to_dict() if self.host is not None else {}
        return converted_json(config, self.mixers, next(iter(self.architectures or ()), None))

    def to_diff_dict(self) -> Record:
        """Return the same as ``to_dict``."""
        return self.to_dict()


def converted_json(config: Record, mixers: dict[str, Spec], architecture: str | None) -> Record:
    """Return the config.json of a converted host.

    Where a class of the host opens the folder itself, sizes that are no numbers stop it: it would draw new attention.
    """
    parts = [name for name, value in config.items() if isinstance(value, dict) and "model_type" in value]
    return {
        **dict.fromkeys(("hidden_size", "num_hidden_layers", *parts), NOTE),
        "model_type": CONVERTED,
        "architectures": [architecture] if architecture else None,
        "kind": "surgery",
        HOST: {"library": "transformers", "class": architecture, "config": config},
        MIXERS_KEY: mixers,
    }


class WithMixers:
    """Mix into the class of a host's config, so that ``save_pretrained`` also writes the mixers of the model."""

    replaced_attention: dict[str, Spec]

    @property
    def base_model_pp_plan(self) -> None:
        """Refuse a class of the host: transformers' own ask for this plan when they have built attention anew."""
        raise MixerError(
            f"this config is of a model whose attention was replaced by tokenmix, which {type(self).__name__}'s own "
            "classes do not build; AutoModel.from_config (or AutoModelForCausalLM ...) does."
        )

    def apart(self) -> ConvertedConfig:
        """Return the host's own config and the mixers, as the Auto classes build a model from them."""
        host = copy.copy(self)
        host.__dict__.pop("replaced_attention")
        host.__class__ = type(self).__mro__[2]
        own: Any = self
        return ConvertedConfig(cast(PreTrainedConfig, host), own.replaced_attention, architectures=own.architectures)

    @classmethod
    def from_dict(cls, config_dict: Record, **kwargs: Any) -> Any:
        """Read a converted folder as well: PEFT reads that of a model by the class of the model's config."""
        kind: Any = cls.__mro__[2]
        if config_dict.get("model_type") not in (CONVERTED, BEFORE):
            return kind.from_dict(config_dict, **kwargs)
        found = ConvertedConfig.from_dict(config_dict, **kwargs)
        whole = found[0] if isinstance(found, tuple) else found
        whole.host.__class__ = with_mixers(type(whole.host))
        whole.host.__dict__["replaced_attention"] = whole.mixers
        return (whole.host, found[1]) if isinstance(found, tuple) else whole.host

    def to_dict(self) -> Record:
        """Return the host's own config."""
        own: Any = super()
        config = own.to_dict()
        config.pop("replaced_attention", None)
        return config

    def to_json_file(self, json_file_path: Path | str, use_diff: bool = True) -> None:
        """Write the config.json of a converted host."""
        architecture = (getattr(self, "architectures", None) or [None])[0]
        with open(json_file_path, "w", encoding="utf-8") as f:
            f.write(json.dumps(converted_json(self.to_dict(), self.replaced_attention, architecture), indent=2) + "\n")

    @property
    def name_or_path(self) -> str | None:
        """Return where the host came from."""
        return self.__dict__.get("_name_or_path")

    @name_or_path.setter
    def name_or_path(self, value: object) -> None:
        """Refuse a folder: transformers' own classes say which one they read, before they draw new attention."""
        if value and Path(str(value)).is_dir():
            raise MixerError(
                f"from_pretrained: config= is that of a model whose {NOTE}, without config=; got {str(value)!r}."
            )
        self.__dict__["_name_or_path"] = str(value)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt_config, (type(self).__mro__[2],), dict(self.__dict__)


_CLASSES: dict[type, type] = {}
ANNOUNCE: list[Callable[[type], object]] = []
"""Called with each new class of configs that have mixers."""


def classes_with_mixers() -> list[type]:
    """Return all classes of configs that have mixers."""
    return list(_CLASSES.values())


def with_mixers(kind: type) -> type:
    """Return the class of this config with ``WithMixers``."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind.__name__, (WithMixers, kind), {"__module__": __name__, "__doc__": kind.__doc__})
        for announce in ANNOUNCE:
            announce(_CLASSES[kind])
    return _CLASSES[kind]


def _rebuilt_config(kind: type) -> Any:
    cls: Any = with_mixers(kind)
    return cls.__new__(cls)


def describe_mixers(model: Any) -> None:
    """Let the configs of all models of transformers in ``model`` name the mixers that replace their attention."""
    from transformers import PreTrainedModel

    done: set[int] = set()
    adapters = {site_name(name, adapter): adapter for name, adapter in adapters_of(model).items()}
    for path, module in list(model.named_modules()):
        config: Any = getattr(module, "config", None)
        if not isinstance(module, PreTrainedModel) or id(config) in done:
            continue
        start = f"{path}." if path else ""
        mixers = {n.removeprefix(start): a.spec for n, a in adapters.items() if n.startswith(start)}
        kind = type(config).__mro__[2] if isinstance(config, WithMixers) else type(config)
        new = copy.copy(config)  # another model may hold the same one
        new.__class__ = with_mixers(kind) if mixers else kind
        new.__dict__.pop("replaced_attention", None)
        if mixers:
            new.__dict__["replaced_attention"] = mixers
        for part in model.modules():
            if part.__dict__.get("config") is config:
                part.config = new
        done.add(id(new))
        # LoRA notes this name as the model that its weights belong to
        module.name_or_path = "" if mixers else new._name_or_path
