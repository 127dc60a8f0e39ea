"""Adapters for attention that is called in a form of its own: its arguments are named, and so is what it returns."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import Mixer
from ...positions import T5Bias
from ...types import Options, Spec
from ..patch_grid import tensors_of
from .adapters import HFAdapter
from .families import CallForm
from .sites import Site


class FormAdapter(HFAdapter):
    """Replace an attention module that a ``CallForm`` describes.

    Args:
        names: the arguments of the replaced module, in order.
    """

    def __init__(
        self, mixer: Mixer, site: Site, spec: Spec, origin: dict[str, nn.Module], dropout: float, names: tuple[str, ...]
    ):
        super().__init__(mixer, site, spec, origin, dropout)
        self.names = names

    def forward(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]  # the host's own arguments
        """Mix the tokens among the arguments; return what the host expects."""
        form = call_form(self.site)
        given = self._name_arguments(args, named)
        x, context = given[form.hidden], given.get(form.context or "")
        if not form.batch_first:
            x, context = x.transpose(0, 1), None if context is None else context.transpose(0, 1)
        y, _ = super().forward(
            x,
            translate_mask(given.get(form.mask or ""), form, x.shape[0]),
            cache=self._cache(given, form),
            encoder_hidden_states=context if self.site.cross else None,
            position_ids=given.get(form.positions or ""),
        )
        return self._fill_returns(form.returns, y if form.batch_first else y.transpose(0, 1), given)

    def read_tokens_mask(self, args: tuple[Any, ...], named: Options) -> Tensor | None:
        """Return the mask of a call as transformers has it, or None."""
        form, given = call_form(self.site), self._name_arguments(args, named)
        rows = given[form.hidden].shape[0 if form.batch_first else 1]
        return translate_mask(given.get(form.mask or ""), form, rows)

    def _name_arguments(self, args: tuple[Any, ...], named: Options) -> Options:
        form, given = call_form(self.site), dict(zip(self.names, args, strict=False)) | named
        known = (form.hidden, form.mask, form.context, form.positions, *form.cache, *form.ignored)
        if form.hidden not in given:
            got = ", ".join(given) or "nothing"
            raise MixerError(f"{self.site.name}: is called without {form.hidden!r}, its tokens; got {got}.")
        for name, value in given.items():
            if name not in known and (next(tensors_of(value), None) is not None or hasattr(value, "get_seq_length")):
                add = "name it in the adapter, under ignored if a mixer does without it"
                how = add if self.site.adapter is not None else "a mixer has no place for it; keep this module"
                raise MixerError(f"{self.site.name}: gets tensors as {name!r}; {how}.")
        return given

    def _cache(self, given: Options, form: CallForm) -> Any:
        caches = {name: given[name] for name in form.cache if given.get(name) is not None}
        for name, cache in caches.items():
            if not hasattr(cache, "get_seq_length"):
                kind = f"gets a {type(cache).__name__} as {name!r}, in which a mixer cannot keep its state"
                raise MixerError(f"{self.site.name}: {kind}; call the model without a cache.")
            if self.site.layer is None:
                raise MixerError(f"{self.site.name}: gets a cache, and its adapter names no layer; give layer=.")
        return next(iter(caches.values()), None)

    def _fill_returns(self, pattern: Any, y: Tensor, given: Options) -> Any:
        if isinstance(pattern, tuple):
            return tuple(self._fill_returns(each, y, given) for each in pattern)
        return y if pattern == "output" else given.get(pattern) if isinstance(pattern, str) else pattern


class T5Adapter(FormAdapter):
    """Replace T5's attention: the first layer of a stack still gives the bias to later layers that keep theirs."""

    gives_bias = False

    def forward(self, *args: Any, **named: Any) -> Any:  # type: ignore[override]  # the host's own arguments
        """Mix the tokens; return the output, the bias and None."""
        given = self._name_arguments(args, named)
        bias = given.get("position_bias")
        if bias is None and self.gives_bias:
            from .cache import tokens_before

            x, cache = given["hidden_states"], self._cache(given, call_form(self.site))
            before = 0 if cache is None else tokens_before(cache, self.site.layer or 0, 0)
            bias = self._compute_bias(x.shape[1], before)
        y, _, _ = super().forward(*args, **named)
        return y, bias, None

    def _compute_bias(self, queries: int, before: int) -> Tensor:
        table: Any = self.relative_attention_bias
        spec = {k: v for k, v in self.site.traits.bias(self.origin[0][""]).items() if k != "name"}  # type: ignore[misc]  # T5 has one
        with torch.device("meta"):
            buckets = T5Bias(self.site.heads, **spec)
        at = torch.arange(before + queries, device=table.weight.device)
        distance = at[before:, None] - at
        return table(buckets.bucket(distance if buckets.two_sided else distance.clamp_min(0))).permute(2, 0, 1)[None]


def share_bias(model: nn.Module) -> None:
    """Let T5's replaced attention know whether a later layer needs its bias."""
    modules = dict(model.named_modules())
    for name, adapter in modules.items():
        if isinstance(adapter, T5Adapter) and hasattr(adapter, "relative_attention_bias"):
            stack = name.partition("block.")[0]
            adapter.gives_bias = any(
                other.startswith(stack) and other.endswith(".SelfAttention") and not isinstance(module, T5Adapter)
                for other, module in modules.items()
            )


def call_form(site: Site) -> CallForm:
    """Return how the module of a site is called."""
    form = site.traits.form
    assert form is not None
    return form


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's arguments, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds)


def output_tokens(given: Any, form: CallForm | None) -> Tensor | None:
    """Return the tokens (B, T, D) among what a module returns; without a form the first tensor, as it lies.

    Raises:
        MixerError: if the module returns something else than its form says.
    """
    if form is None:
        return next(tensors_of(given), None)
    tokens = given
    if isinstance(form.returns, tuple):
        alike = isinstance(given, (tuple, list)) and len(given) == len(form.returns)
        tokens = given[form.returns.index("output")] if alike else None
    if not isinstance(tokens, Tensor):
        kind = f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, (tuple, list)) else "")
        raise MixerError(f"its attention returns {kind}, and returns={form.returns!r} was expected")
    return tokens if form.batch_first else tokens.transpose(0, 1)


def translate_mask(mask: Tensor | None, form: CallForm, rows: int) -> Tensor | None:
    """Bring a mask to the form that transformers has: (B, S), or (B, T, S) and (B, 1, T, S), True = may be attended."""
    if mask is None:
        return None
    if form.mask_means == "add":
        mask = mask if form.hidden_below == -1e4 else mask.masked_fill(mask <= form.hidden_below, -torch.inf)
    else:
        mask = mask.bool() if form.mask_means == "keep" else ~mask.bool()
    if mask.ndim == 2 and form.mask_axes == "TS":
        mask = mask[None]
    if mask.shape[0] not in (1, rows) and rows % mask.shape[0] == 0:  # windows of one image after another
        mask = mask.repeat(rows // mask.shape[0], *[1] * (mask.ndim - 1))
    return mask


def probe_mask(form: CallForm, allowed: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    """Return a mask as the host would pass it.

    Args:
        allowed, keys, mask: the pairs (B, 1, T, S) and the keys (B, S) that may be attended; the pairs as numbers.
    """
    if form.mask_axes == "BS":
        kept = keys
    else:
        kept = {"TS": allowed[0, 0], "BTS": allowed[:, 0], "B1TS": allowed}[form.mask_axes]
    if form.mask_means == "keep":
        return kept
    if form.mask_means == "hide":
        return ~kept
    low = max(form.hidden_below, float(torch.finfo(mask.dtype).min)) if form.hidden_below != -1e4 else mask.min()
    return torch.zeros(kept.shape, dtype=mask.dtype, device=mask.device).masked_fill(~kept, float(low))
