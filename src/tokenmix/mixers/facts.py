"""The facts that a class of mixers states about itself.

Surgery, benchmarks, pictures, tables and tests read them here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from .. import functional
from ..errors import MixerError
from ..system.config import nearest

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


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a class of mixers: ``facts = Facts(causal=True, streaming=True)`` in its body.

    A class inherits those that it does not state.

    Args:
        causal: whether there is a causal form.
        causal_only: whether it is the only one, as of a recurrence. This states ``causal`` and excludes ``context``, as
            a context is not in order.
        streaming: whether ``extend`` mixes a chunk, given the state after the tokens before it.
        context: whether queries may attend another sequence.
        attn_mask: whether it weights pairs of tokens, each of which a mask can exclude.
        grid: whether it takes the size of a grid of tokens.
        export: whether torch.export and torch.jit.trace take it.
        segments: whether it computes segments; stated by the base class ``Segmented``.
        key_blocks: whether it reads keys in blocks; stated by the base class ``KeyBlocks``.
        waivers: promises of the contract that the method cannot keep, each with the reason.
        about: its description in tables.
        form: the functional form that ``mix`` calls: a function, or a name in ``tokenmix.functional``. A form of this
            library has a reference of the same name in ``tokenmix.reference``.
        carries: the projections that take over weights when softmax attention is replaced, "q_norm" and "k_norm"
            included. All other parameters are initialised.
        copies: projections that start as copies of others of the same mixer, such as {"q_global": "q_proj"}.
        signed: whether terms of both signs may cancel within a row. Errors are then measured against the largest output
            of all rows instead of that of the row.
        conditioned: options of the functional form under which its error is measured. A form that divides by numbers
            that may cancel, as a norm of its sums does, has no bound on its error otherwise.
        kernels: the kernels that serve it.
        page: stem of its page in docs/mixers; None: that of its module.
        only_qkv: whether the functional form depends on queries, keys and values only. Such a mixer can serve as an
            attention function of transformers.
        fixed_when_traced: whether a program of torch.jit.trace works only for the number of tokens that it was traced
            with: True where the length selects the algorithm, or a loop over blocks is unrolled by the trace; "causal":
            in the causal form only.
        knows_positions: whether it encodes relative position itself, with ``modern_options``, so that a model need not
            add any. A dense Synthesizer does not: its tokens choose among absolute positions.
        modern_options: options that it takes in models of the "modern" shell, unless its spec sets them.
        needs_one_of: options that have defaults, of which one must be given all the same; messages ask for the first.

    Raises:
        MixerError: for a name that is none of these, and for facts that contradict each other.
    """

    causal: bool = False
    causal_only: bool = False
    streaming: bool = False
    context: bool = False
    attn_mask: bool = False
    grid: bool = False
    export: bool = True
    segments: bool = False
    key_blocks: bool = False
    waivers: dict[str, str] = field(default_factory=dict)
    about: About = About()
    form: str | Callable[..., Tensor] | None = None
    carries: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    signed: bool = False
    conditioned: dict[str, Any] = field(default_factory=dict)
    kernels: Kernels = Kernels()
    page: str | None = None
    only_qkv: bool = False
    fixed_when_traced: bool | Literal["causal"] = False
    knows_positions: bool = False
    modern_options: dict[str, Any] = field(default_factory=dict)
    needs_one_of: tuple[str, ...] = ()
    stated: frozenset[str] = field(init=False, repr=False, compare=False)
    """The names of the facts that the class itself gives; it inherits the others."""

    def __new__(cls, **given: Any) -> Facts:
        """Note which facts are given."""
        known = [name for name in cls.__dataclass_fields__ if name != "stated"]
        for name in given:
            if name not in known:
                raise MixerError(f"Facts: no fact is called {name!r}; {nearest(name, known)}.")
        facts = super().__new__(cls)
        object.__setattr__(facts, "stated", frozenset(given))
        return facts

    def __post_init__(self) -> None:
        if self.causal_only:
            if self.context or "causal" in self.stated and not self.causal:
                raise MixerError("Facts: causal_only=True excludes context=True and causal=False; leave one out.")
            object.__setattr__(self, "causal", True)
            object.__setattr__(self, "stated", self.stated | {"causal", "context"})

    def inherit(self, bases: Iterable[Facts]) -> Facts:
        """Return these facts, with each that they do not state as the first of the bases that states it has it."""
        found: dict[str, Any] = {}
        for facts in (self, *bases):
            found = {name: getattr(facts, name) for name in facts.stated} | found
        merged = Facts(**found)
        object.__setattr__(merged, "stated", self.stated)
        return merged

    def causal_forms(self) -> tuple[bool, ...]:
        """Return the values of ``causal`` that the class can be built with."""
        return (True,) if self.causal_only else (False, True) if self.causal else (False,)

    def has_fixed_length(self, causal: bool) -> bool:
        """Return whether a program of torch.jit.trace of this form works for the traced length only."""
        return self.fixed_when_traced is True or causal and bool(self.fixed_when_traced)

    def functional_form(self) -> Callable[..., Tensor] | None:
        """Return the function that ``form`` names; None if there is none."""
        return getattr(functional, self.form) if isinstance(self.form, str) else self.form


class HasFacts(nn.Module):
    """A module whose class states facts; ``Mixer`` derives from it."""

    facts: ClassVar[Facts] = Facts()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for each in cls.__mro__:
            check_names(cls.__name__, vars(each))
        own, *bases = (vars(each).get("facts", Facts()) for each in cls.__mro__)
        if not isinstance(own, Facts):
            raise MixerError(f"{cls.__name__}: facts must be Facts(...), got {own!r}.")
        cls.facts = own.inherit(bases)

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
        known, required = mixer_options(cls), required_options(cls)
        usual = {"max_len": length, "window": min(32, length), "heads": heads or 8, "kernel_size": 11 if grid else 33}
        chosen = {name: usual[name] for name in usual if name in required or name == "heads" in known and heads}
        return chosen | ({"ndim": len(grid)} if grid and "ndim" in known else {})


def mixer_options(cls: type) -> dict[str, Any]:
    """Return the keyword-only options of a mixer and their defaults; ``inspect.Parameter.empty`` means required."""
    parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]  # the class's own __init__
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def page_stem(cls: type[HasFacts]) -> str:
    """Return the stem of a mixer's page in docs/mixers."""
    return cls.facts.page or cls.__module__.split(".")[-1]


def required_options(cls: type[HasFacts], given: Collection[str] = ()) -> list[str]:
    """Return the options that must be given and are not among those given, by name."""
    either = cls.facts.needs_one_of
    missing = list(either[:1]) if not set(either) & set(given) else []
    known = mixer_options(cls).items()
    return missing + [name for name, default in known if default is inspect.Parameter.empty and name not in given]


_FACT_NAMES = {f"supports_{name}": name for name in ("causal", "streaming", "context", "attn_mask", "grid", "export")}
_FACT_NAMES |= {
    name: name
    for name in Facts.__dataclass_fields__
    if name not in {*_FACT_NAMES.values(), "segments", "key_blocks", "page", "stated"}
}
_INSTEAD = {
    "causal_forms": "they follow from causal and causal_only in facts",
    "functional_form": "write facts = Facts(form=...)",
    "required_options": "write facts = Facts(needs_one_of=(...,))",
    "has_segments": "override narrow_capabilities, with replace(can, segments=...)",
    "has_key_blocks": "override narrow_capabilities, with replace(can, key_blocks=...)",
    "keeps_context": "override narrow_capabilities, with replace(can, keeps_context=...)",
    "empty_context_state": "return that state from empty_state where self.causal is False",
    "projection_flops": "give them to MixingCost(projections=...) in mixing_cost",
}
"""Attributes that nothing would read in a class of mixers, and what to write."""


def check_names(owner: str, names: Iterable[str]) -> None:
    """Refuse the names of facts as attributes, and of methods that nothing would call."""
    if facts := [_FACT_NAMES[name] for name in names if name in _FACT_NAMES]:
        old = ", ".join(name for name in names if name in _FACT_NAMES)
        new = ", ".join(f"{name}=..." for name in facts)
        raise MixerError(f"{owner}: nothing reads the attribute {old}; write facts = Facts({new}) in the class.")
    for name in names:
        if name in _INSTEAD:
            raise MixerError(f"{owner}: nothing calls {name}; {_INSTEAD[name]}.")
