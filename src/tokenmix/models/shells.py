"""Two named shells around mixers: that of the papers, and current practice.

Every comparison of mixers states its shell, because the shell changes the result as much as the mixer does.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Literal, get_args

from ..errors import MixerError
from ..mixers.registration import load_mixer
from ..types import Options, Spec

Shell = Literal["paper", "modern"]
SHELLS = get_args(Shell)

PAPER = {"norm_type": "layer", "mlp": "gelu", "positions": "learned", "logit_cap": None}
MODERN = {"norm_type": "rms", "mlp": "swiglu", "logit_cap": None}


def in_shell(config: Any, shell: str) -> Any:
    """Return the config of a model with the blocks of a shell.

    paper: LayerNorm, GELU, learned positions added to the embedding, mixers as their specs say. modern: RMSNorm,
    SwiGLU, and the ``modern_options`` of each mixer, which are rotary positions and normalised queries and keys for
    softmax attention, but no positions between source and target; the model adds no positions if in each of its stacks
    a mixer knows them, else learned ones. What a spec sets itself stays, and so do added positions given as an object,
    such as Abacus. Weights that write to the residual stream are scaled down by the depth in both shells.

    Raises:
        MixerError: for an unknown shell, and for "modern" with a model whose blocks are fixed (a pyramid, EAMLP).
    """
    if shell not in SHELLS:
        raise MixerError(f"there is no shell {shell!r}; choose 'paper' or 'modern'.")
    known = {field.name for field in fields(config)}
    if "norm_type" not in known:
        if shell == "paper":
            return config
        raise MixerError(f"a model of kind {config.kind!r} has the blocks of its paper, and no other shell.")
    if shell == "paper":
        changes: Options = PAPER
    else:
        stacks = {name: getattr(config, name, None) for name in ("mixers", "encoder_mixers")}
        own = {name: tuple(_modern(spec) for spec in specs) for name, specs in stacks.items() if specs is not None}
        ordered = all(any(_knows_positions(spec) for spec in specs) for specs in own.values())
        across = tuple(_modern_across(spec) for spec in getattr(config, "cross_mixers", ()))
        changes = MODERN | own | {"cross_mixers": across, "positions": None if ordered else "learned"}
    if isinstance(getattr(config, "positions", None), dict):
        changes = {**changes, "positions": config.positions}
    return replace(config, **{name: value for name, value in changes.items() if name in known})


def shell_of(config: Any) -> str:
    """Return the shell that a config is in: "paper", "modern" or "custom"."""
    if "norm_type" not in {field.name for field in fields(config)}:
        return "paper"
    return next((shell for shell in SHELLS if in_shell(config, shell) == config), "custom")


def _modern(spec: Spec) -> Spec:
    return spec | {k: v for k, v in _modern_options(spec).items() if k not in spec}


def _modern_across(spec: Spec) -> Spec:
    """Do the same for a mixer from one sequence to another, which have no positions in common."""
    return _modern({"positions": None} | spec if "positions" in _modern_options(spec) else spec)


def _modern_options(spec: Spec) -> Options:
    cls = load_mixer(spec["name"])
    return {} if cls is None else cls.facts.modern_options


def _knows_positions(spec: Spec) -> bool:
    cls = load_mixer(spec["name"])
    return cls is not None and cls.facts.knows_positions
