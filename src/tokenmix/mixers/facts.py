"""The facts that a class of mixers states about itself.

Surgery, benchmarks, pictures, tables and tests read them here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from .. import functional

QKVO = ("q_proj", "k_proj", "v_proj", "out_proj")
"""The four projections of softmax attention."""


class About(NamedTuple):
    """The description of a class of mixers in tables.

    Args:
        paper: "Authors year, arXiv number or venue".
        kind: the category: "attention", "attention free", "kernel", "low rank", "fixed pattern", "learned pattern",
            "memory", "synthetic" and others.
        time: complexity in T, D and the symbols of the options, such as "T s D".
        space: complexity of what is kept for the backward pass, without parameters, such as "T D".
        idea: how it mixes, in a few words.
        tier: "core" mixers have full pages and recipes and are tested in every adapter; "extended" ones keep the same
            contract.
    """

    paper: str = ""
    kind: str = ""
    time: str = ""
    space: str = ""
    idea: str = ""
    tier: Literal["core", "extended"] = "extended"


class Kernels(NamedTuple):
    """The fused kernels that serve a mixer.

    Args:
        whole: names of the operators for whole sequences.
        step: name of the C kernel for a few streamed tokens; None if there is none.
    """

    whole: tuple[str, ...] = ()
    step: str | None = None


class Facts(nn.Module):
    """Hold the facts that a class of mixers states; ``Mixer`` derives from it."""

    supports_causal: ClassVar[bool] = False
    causal_only: ClassVar[bool] = False
    """Whether the causal form is the only one, as of a recurrence.

    This states ``supports_causal`` and excludes ``supports_context``, as a context is not in order.
    """
    supports_streaming: ClassVar[bool] = False
    supports_context: ClassVar[bool] = False
    supports_attn_mask: ClassVar[bool] = False
    supports_grid: ClassVar[bool] = False
    supports_export: ClassVar[bool] = True
    waivers: ClassVar[dict[str, str]] = {}
    """Promises of the contract that the method cannot keep, each with the reason."""
    about: ClassVar[About] = About()
    form: ClassVar[str | Callable[..., Tensor] | None] = None
    """The functional form that ``mix`` calls, or None: a function, or a name in ``tokenmix.functional``.

    A form of this library has a reference of the same name in ``tokenmix.reference``.
    """
    carries: ClassVar[tuple[str, ...]] = ()
    """The projections that take over weights when softmax attention is replaced, "q_norm" and "k_norm" included.

    All other parameters are initialised.
    """
    copies: ClassVar[dict[str, str]] = {}
    """Projections that start as copies of others of the same mixer, such as {"q_global": "q_proj"}."""
    signed: ClassVar[bool] = False
    """Whether terms of both signs may cancel within a row.

    Errors are then measured against the largest output of all rows instead of that of the row.
    """
    conditioned: ClassVar[dict[str, Any]] = {}
    """Options of the functional form under which its error is measured.

    A form that divides by numbers that may cancel, as a norm of its sums does, has no bound on its error otherwise.
    """
    kernels: ClassVar[Kernels] = Kernels()
    page: ClassVar[str]
    """Stem of the mixer's page in docs/mixers; that of its module unless the class says otherwise."""
    only_qkv: ClassVar[bool] = False
    """Whether the functional form depends on queries, keys and values only.

    Such a mixer can serve as an attention function of transformers.
    """

    fixed_when_traced: ClassVar[bool | Literal["causal"]] = False
    """Whether a program of torch.jit.trace works only for the number of tokens that it was traced with.

    True where the length selects the algorithm, or a loop over blocks is unrolled by the trace; "causal": in the causal
    form only.
    """

    knows_positions: ClassVar[bool] = False
    """Whether the mixer encodes relative position itself, with ``modern_options``, so that a model need not add any.

    A dense Synthesizer does not: its tokens choose among absolute positions.
    """
    modern_options: ClassVar[dict[str, Any]] = {}
    """Options that the mixer takes in models of the "modern" shell, unless its spec sets them."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.page = vars(cls).get("page", cls.__module__.split(".")[-1])
        if cls.causal_only:
            cls.supports_causal, cls.supports_context = True, False

    @classmethod
    def causal_forms(cls) -> tuple[bool, ...]:
        """Return the values of ``causal`` that this class can be built with."""
        return (True,) if cls.causal_only else (False, True) if cls.supports_causal else (False,)

    @classmethod
    def functional_form(cls) -> Callable[..., Tensor] | None:
        """Return the function that ``form`` names; None if there is none."""
        return getattr(functional, cls.form) if isinstance(cls.form, str) else cls.form

    @classmethod
    def required_options(cls, given: Collection[str] = ()) -> list[str]:
        """Return the options without a default that are not among those given, by name."""
        return [n for n, default in mixer_options(cls).items() if default is inspect.Parameter.empty and n not in given]

    @classmethod
    def example_options(
        cls, length: int, *, heads: int | None = None, grid: tuple[int, ...] | None = None
    ) -> dict[str, Any]:
        """Choose values for the required options, so that the mixer can be built for sequences of ``length`` tokens.

        Mixers with required options other than max_len, window, heads and kernel_size override this.

        Args:
            heads: number of heads, for mixers with this option; None: the default, or 8 where there is none.
            grid: size of the token grid, for mixers that need its number of axes.
        """
        known, required = mixer_options(cls), cls.required_options()
        usual = {"max_len": length, "window": min(32, length), "heads": heads or 8, "kernel_size": 11 if grid else 33}
        chosen = {name: usual[name] for name in usual if name in required or name == "heads" in known and heads}
        return chosen | ({"ndim": len(grid)} if grid and "ndim" in known else {})


def mixer_options(cls: type) -> dict[str, Any]:
    """Return the keyword-only options of a mixer and their defaults; ``inspect.Parameter.empty`` means required."""
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]  # the class's own __init__
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
