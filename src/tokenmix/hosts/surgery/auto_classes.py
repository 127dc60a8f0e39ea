"""Open folders of converted hosts by transformers' Auto classes. Needs transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ...errors import MixerError
from ...types import Record, Spec
from .adapters import adapters_of
from .converted_config import ANNOUNCE, ConvertedConfig, WithMixers, classes_with_mixers
from .register_config import register_config
from .replace import replace_mixers
from .sites import find_attention


def load_with_mixers(
    host_class: Any, folder: Path | str, config: ConvertedConfig, *args: object, **options: object
) -> Any:
    """Load a folder as ``host_class`` with its mixers, by the class's own ``from_pretrained``.

    Raises:
        MixerError: for a folder that does not describe its mixers, or lacks weights of them or of anything but a new
            head.
    """

    class Replaced(host_class):
        def __init__(self, host_config: PreTrainedConfig, *inputs: object, **kwargs: object):
            super().__init__(host_config, *inputs, **kwargs)
            self.__class__ = host_class
            _put_back(self, config.mixers)

    Replaced.__name__ = host_class.__name__
    wanted = options.pop("output_loading_info", False)
    model, info = Replaced.from_pretrained(folder, *args, config=config.host, output_loading_info=True, **options)
    model.name_or_path = str(folder)
    _refuse_new_weights(model, info, config, folder, bool(options.get("ignore_mismatched_sizes")))
    return (model, info) if wanted else model


def _put_back(model: PreTrainedModel, mixers: dict[str, Spec]) -> PreTrainedModel:
    """Replace attention again, in a model that may have a head more or less than the one that was saved."""
    sites, prefix = {site.name for site in find_attention(model)}, f"{model.base_model_prefix}."
    more, less = ({prefix + n: s for n, s in mixers.items()}, {n.removeprefix(prefix): s for n, s in mixers.items()})
    named = max((mixers, more, less), key=lambda each: len(sites & set(each)))
    plan = {name: spec for name, spec in named.items() if name in sites}
    if not plan:
        have = f"the folder's mixers are for {next(iter(mixers), 'no module')}, which a {type(model).__name__} has not"
        raise MixerError(f"AutoModel: {have}.")
    return replace_mixers(model, plan, init="random", inplace=True)[0]


def _refuse_new_weights(
    model: nn.Module, info: Record, config: ConvertedConfig, folder: Path | str, resized: bool
) -> None:
    """Refuse weights that transformers has drawn at random, unless outside the layers: a new head or pooler."""
    drawn = {*info["missing_keys"], *(key[0] for key in info["mismatched_keys"])}
    layers = tuple({re.split(r"(?<=\.)\d+\.", name)[0] for name in adapters_of(model)})
    same = type(model).__name__ in (config.architectures or ()) and not resized
    lost = sorted(key for key in drawn if same or key.startswith(layers))
    if lost:
        count = f"{len(lost)} of {len(model.state_dict())} weights of its {type(model).__name__}"
        raise MixerError(f"{folder}: lacks {count}, such as {lost[0]}; save the whole model again.")


class _Opened:
    """Stand for the models of one Auto class whose attention was replaced."""

    config_class = ConvertedConfig
    auto: Any

    @classmethod
    def from_pretrained(cls, folder: Path | str, *args: object, config: Any = None, **options: object) -> Any:
        """Load the model that the Auto class would load if nothing had been replaced."""
        config = config.apart() if isinstance(config, WithMixers) else config
        return load_with_mixers(cls._host_class(config, folder), folder, config, *args, **options)

    @classmethod
    def _from_config(cls, config: Any, **options: object) -> PreTrainedModel:
        """Build the host and replace its attention; all weights are new."""
        config = config.apart() if isinstance(config, WithMixers) else config
        host_class = cls._host_class(config, "from_config")
        return _put_back(host_class._from_config(config.host, **options), config.mixers)

    @classmethod
    def _host_class(cls, config: Any, folder: object) -> Any:
        known, kind = cls.auto._model_mapping, type(config.host)
        if kind not in known:
            built = (config.architectures or [kind.__name__])[0]
            raise MixerError(f"{folder}: holds a {built} with mixers, and {cls.auto.__name__} has no class for that.")
        found = known[kind]
        if not isinstance(found, (list, tuple)):
            return found
        return next((each for each in found if each.__name__ in (config.architectures or ())), found[0])


_AUTO: dict[Any, type] = {}
"""Auto class -> what it finds for a model whose attention was replaced."""


def register_converted() -> None:
    """Register converted hosts with all Auto classes of models."""
    register_config()
    if _AUTO:
        return
    for name in dir(modeling_auto):
        auto: Any = getattr(modeling_auto, name) if name.startswith("AutoModel") else None
        if getattr(auto, "_model_mapping", None) is not None:
            _AUTO[auto] = type(f"Converted{name}", (_Opened,), {"auto": auto})
    ANNOUNCE.append(_register_class)
    for kind in (ConvertedConfig, *classes_with_mixers()):
        _register_class(kind)


def _register_class(kind: type) -> None:
    """Let all Auto classes know one class of configs."""
    for auto, opened in _AUTO.items():
        auto._model_mapping.register(kind, opened, exist_ok=True)


def load_saved(folder: Path) -> PreTrainedModel:
    """Load a folder that ``save_pretrained`` wrote, as the class that its config names."""
    register_converted()
    config = AutoConfig.from_pretrained(folder)
    named = (config.architectures or [None])[0]
    host_class = getattr(transformers, str(named), None)
    if host_class is None:
        raise MixerError(f"{folder / 'config.json'}: transformers {transformers.__version__} has no class {named!r}.")
    return load_with_mixers(host_class, folder, config)


register_converted()
