"""Let a user describe attention of a class that no family knows: its weights, how it is called, what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...types import Options
from .families import CallForm, Family, forward_class, head_norm

Number = int | str
"""A number, or the dotted name of the module's attribute that holds it."""


@dataclass(frozen=True, eq=False)
class AttentionAdapter:
    """Describe attention of your own: where its weights are, how the host calls it, what it returns.

    ``replace_mixers(model, mixers, adapter=...)`` then replaces modules of these classes as those of known families.
    Each is verified first: a copy with random weights is compared with softmax attention with the same weights.

    Args:
        classes: the classes that define the modules' ``forward``, or their names; one or several.
        qkv: name of the ``nn.Linear`` with queries, keys and values in this order, or a tuple of three names. Names are
            dotted, from the module on.
        out: name of the ``nn.Linear`` of the output.
        heads: number of heads. Numbers are given, or named: the dotted name of an attribute of the module.
        kv_heads: number of heads of keys and values; None: as many as of queries.
        causal: queries attend only themselves and earlier tokens. True, False or an attribute.
        cross: keys and values come from the argument ``context``. True, False or an attribute.
        hidden: name of the argument with the tokens, (B, T, D).
        mask: name of the argument with a mask; None: it has none.
        mask_axes: "BS", of keys; "TS", "BTS" or "B1TS", of pairs. For fewer rows than tokens have, rows repeat.
        mask_means: "keep": True or 1 is attended; "hide": True or 1 is not; "add": numbers that are added to logits.
        hidden_below: numbers of such a mask at or below this hide; -10,000 by default.
        context: name of the argument with the other sequence of cross-attention.
        positions: name of the argument with the position (B, T) of each token; None: tokens are counted.
        cache: names of arguments with a cache of transformers, in which the mixer keeps its state; with any other cache
            a call raises an error.
        layer: number of the layer in such a cache; None: it has none.
        ignored: names of arguments with tensors that mixers do without, as tables of rotary positions. A tensor in an
            argument that is not named here raises an error.
        returns: "output", or a tuple with "output" in its place, names of arguments that are passed on, and constants:
            ``("output", None)``.
        batch_first: False: tokens are (T, B, D).
        transposed: weights are (in, out), as in transformers' ``Conv1D``.
        by_head: a fused tensor has the parts of one head after those of another.
        dropout: name of the module, or of the rate, of the dropout of the output, which stays.
        max_len: number of tokens that the model has positions for; None: unlimited or unknown.
        tokens: the only number of tokens that the module takes, as a window does; None: any.
        softmax: options with which the mixer ``attention`` computes the same: ``{"scale": 1.0}``, ``{"positions":
            {"name": "rotary"}}``; or a function of the module that returns them.
        beyond: what the logits have that is lost with the module: name of a parameter or an attribute -> what it is,
            ``{"cap": "a cap on its logits"}``. The rest is verified with zeros, or None, there; ``attention`` is
            refused as a replacement, and for other mixers the report names it.
        example: returns the arguments that the host passes besides those above, for a module and its tokens, as a
            table of rotary positions; verification needs them.

    Raises:
        MixerError: for a value that is none of these.
    """

    classes: str | type | tuple[str | type, ...]
    qkv: str | tuple[str, str, str] = ("q_proj", "k_proj", "v_proj")
    out: str = "out_proj"
    heads: Number = "num_heads"
    kv_heads: Number | None = None
    causal: bool | str = False
    cross: bool | str = False
    hidden: str = "x"
    mask: str | None = None
    mask_axes: Literal["BS", "TS", "BTS", "B1TS"] = "BS"
    mask_means: Literal["keep", "hide", "add"] = "keep"
    hidden_below: float = -1e4
    context: str | None = None
    positions: str | None = None
    cache: tuple[str, ...] = ()
    layer: Number | None = None
    ignored: tuple[str, ...] = ()
    returns: Any = "output"
    batch_first: bool = True
    transposed: bool = False
    by_head: bool = False
    dropout: str | None = None
    max_len: Number | None = None
    tokens: Number | None = None
    softmax: Options | Callable[[Any], Options] = field(default_factory=dict)
    beyond: Mapping[str, str] = field(default_factory=dict)
    example: Callable[[Any, Tensor], Options] = field(default=lambda module, x: {})

    def __post_init__(self) -> None:
        parts = self.returns if isinstance(self.returns, tuple) else (self.returns,)
        for name, value, fine in (
            ("classes", self.classes, bool(self.names)),
            ("qkv", self.qkv, isinstance(self.qkv, str) or (isinstance(self.qkv, tuple) and len(self.qkv) == 3)),
            ("mask_axes", self.mask_axes, self.mask_axes in ("BS", "TS", "BTS", "B1TS")),
            ("mask_means", self.mask_means, self.mask_means in ("keep", "hide", "add")),
            ("cache", self.cache, isinstance(self.cache, tuple)),
            ("ignored", self.ignored, isinstance(self.ignored, tuple)),
            ("returns", self.returns, "output" in parts),
        ):
            if not fine:
                raise MixerError(f"AttentionAdapter: {name}={value!r} is none of the values that its docstring lists.")

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        given = self.classes if isinstance(self.classes, tuple) else (self.classes,)
        return tuple(each if isinstance(each, str) else each.__name__ for each in given)

    @cached_property
    def family(self) -> Family:
        """Return the same as surgery's own description of a family."""
        parts = (self.qkv,) * 3 if isinstance(self.qkv, str) else self.qkv
        softmax = self.softmax
        q, k, v, out = (_weight(name) for name in (*parts, self.out))
        return Family(
            classes=self.names,
            library="own",
            weights=(q, k, v, out),
            by_head=self.by_head,
            transposed=self.transposed,
            kept=tuple(self.beyond),
            dropout=self.dropout or "",
            form=CallForm(
                self.hidden,
                self.mask,
                self.context,
                self.positions,
                self.cache,
                self.ignored,
                self.returns,
                self.mask_axes,
                self.mask_means,
                self.hidden_below,
                self.batch_first,
                lambda module: None if self.tokens is None else self._number(module, "tokens"),
                self.example,
            ),
            neutral=tuple(self.beyond),
            softmax=softmax if callable(softmax) else lambda module: softmax,
        )

    def describes(self, module: nn.Module) -> bool:
        """Return whether a module's ``forward`` is that of one of the classes."""
        owner, given = forward_class(module), self.classes if isinstance(self.classes, tuple) else (self.classes,)
        return owner is not None and any(each in (owner, owner.__name__) for each in given)

    def read(self, module: nn.Module) -> Options:
        """Return what a module is, as fields of ``Site``.

        Raises:
            MixerError: if it lacks something that is named here.
        """
        state = module.state_dict()
        weights = self.family.weights
        for name in dict.fromkeys(weights):
            if name not in state:
                raise MixerError(f"a {type(module).__name__} has no {name}; it has {', '.join(state) or 'no weights'}")
        heads = self._number(module, "heads")
        kv_heads = heads if self.kv_heads is None else self._number(module, "kv_heads")
        rows, columns = state[weights[0]].shape[::-1] if self.transposed else state[weights[0]].shape
        count = heads + 2 * kv_heads if isinstance(self.qkv, str) else heads
        if heads < 1 or kv_heads < 1 or rows % count:
            shape = tuple(state[weights[0]].shape)
            raise MixerError(f"heads={heads} and kv_heads={kv_heads} do not divide {weights[0]} of shape {shape}")
        head_dim, options = rows // count, self.family.softmax(module)
        longest = self.max_len if self.max_len is not None else self.tokens
        rotary = (options.get("positions") or {}).get("name") == "rotary"
        beyond = [what for path, what in self.beyond.items() if _is_there(module, path)]
        return {
            "dim": columns,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "causal": self._flag(module, "causal"),
            "cross": self._flag(module, "cross"),
            "rotary": rotary,
            "max_len": None if longest is None else self._number(module, "max_len" if self.max_len else "tokens"),
            "qk_norm": head_norm(module, head_dim),
            "layer": None if self.layer is None else self._number(module, "layer"),
            "beyond": " and ".join(beyond) or None,
        }

    def _number(self, module: nn.Module, name: str) -> int:
        value = self._value(module, name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise MixerError(f"{name} must be a whole number, or the name of one, got {value!r}")
        return value

    def _flag(self, module: nn.Module, name: str) -> bool:
        return bool(self._value(module, name))

    def _value(self, module: nn.Module, name: str) -> Any:
        given = getattr(self, name)
        try:
            return attrgetter(given)(module) if isinstance(given, str) else given
        except AttributeError:
            raise MixerError(f"a {type(module).__name__} has no {given!r}, which the adapter gives as {name}") from None


def _weight(name: str) -> str:
    return name if name.endswith("weight") else f"{name}.weight"


def _is_there(module: nn.Module, path: str) -> bool:
    """Return whether a module has something at a path that changes what it computes."""
    try:
        found = attrgetter(path)(module)
    except AttributeError:
        raise MixerError(f"a {type(module).__name__} has no {path!r}, which the adapter names in beyond") from None
    return isinstance(found, torch.Tensor) or bool(found)
