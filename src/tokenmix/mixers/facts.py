"""What a class of mixers states about itself. Everything that treats mixers differently (surgery, benchmarks, pictures, tables, tests) reads it here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from .. import functional

QKVO = ("q_proj", "k_proj", "v_proj", "out_proj")
"""The four projections of softmax attention."""


class About(NamedTuple):
    """What the tables of mixers say of a class: where it comes from, what kind it is, what it costs, how far its support goes.

    Args:
        paper: "Authors year, arXiv number or venue".
        kind: of the taxonomy: "attention", "attention free", "kernel", "low rank", "fixed pattern", "learned pattern", "memory", "synthetic" and others.
        time: in T, D and the options' own symbols: "T s D".
        space: of what is kept for the backward pass, beside parameters: "T D".
        idea: how it mixes, in a few words.
        tier: "core" mixers have full pages and recipes and are tested in every adapter; "extended" ones keep the same contract.
    """

    paper: str = ""
    kind: str = ""
    time: str = ""
    space: str = ""
    idea: str = ""
    tier: Literal["core", "extended"] = "extended"


class Kernels(NamedTuple):
    """The fused kernels that serve a mixer: ``whole`` names operators for whole sequences, ``step`` the C kernel for a few streamed tokens."""

    whole: tuple[str, ...] = ()
    step: str | None = None


class Facts(nn.Module):
    """The facts that a class of mixers states; ``Mixer`` is one."""

    supports_causal: ClassVar[bool] = False
    supports_streaming: ClassVar[bool] = False
    supports_context: ClassVar[bool] = False
    supports_attn_mask: ClassVar[bool] = False
    supports_grid: ClassVar[bool] = False
    supports_export: ClassVar[bool] = True
    waivers: ClassVar[dict[str, str]] = {}
    """Promises of the contract that the method cannot keep, each with its reason."""
    about: ClassVar[About] = About()
    form: ClassVar[str | Callable[..., Tensor] | None] = None
    """The functional form that ``mix`` calls: its name in ``tokenmix.functional``, where its reference has the same name, or a function. None: it has none."""
    carries: ClassVar[tuple[str, ...]] = ()
    """The projections that take over those of softmax attention when it is replaced, "q_norm" and "k_norm" included; everything else starts new."""
    copies: ClassVar[dict[str, str]] = {}
    """Projections that start as copies of others of the mixer: {"q_global": "q_proj"}."""
    signed: ClassVar[bool] = False
    """Whether its weights or values of both signs may cancel within a row: errors are then measured against the largest output, not against that of the row."""
    kernels: ClassVar[Kernels] = Kernels()
    only_qkv: ClassVar[bool] = False
    """Whether queries, keys and values alone decide what its functional form computes, so that it can be an attention function of transformers."""

    @classmethod
    def functional_form(cls) -> Callable[..., Tensor] | None:
        """The function behind ``form``."""
        return getattr(functional, cls.form) if isinstance(cls.form, str) else cls.form

    @classmethod
    def example_options(cls, length: int, *, heads: int | None = None, grid: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Choose values for the options that have no default, so that the mixer can be built for sequences of ``length`` tokens.

        Args:
            heads: for mixers with this option; None: the default, or 8 where there is none.
            grid: of the tokens, for mixers that must know its number of axes.

        A mixer whose options without a default have other names than max_len, window, heads and kernel_size overrides this.
        """
        known = mixer_options(cls)
        usual = {"max_len": length, "window": min(32, length), "heads": heads or 8, "kernel_size": 11 if grid else 33}
        chosen = {name: usual[name] for name in usual if name in known and (known[name] is inspect.Parameter.empty or name == "heads" and heads)}
        return chosen | ({"ndim": len(grid)} if grid and "ndim" in known else {})


def mixer_options(cls: type) -> dict[str, Any]:
    """The keyword-only options of a mixer and their defaults; ``inspect.Parameter.empty`` where one must be given."""
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]  # of the class at hand
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
