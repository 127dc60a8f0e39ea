"""Adapters that replace attention in a host: they call a mixer with the host's arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...mixers import Mixer
from ...mixers.attention import Attention
from ...types import Options, Spec
from ..cache_names import CACHE_NAMES, given_cache
from ..patch_grid import PatchGrid
from ..torch import MultiheadMixer
from .masks import Read, read_mask, refuse_packed, window_mask
from .sites import Site

if TYPE_CHECKING:
    from transformers import Cache

    from ..huggingface.cache import TokenMixStateLayer


class Adapter(nn.Module):
    """A mixer in the place of a host's attention module.

    Args:
        mixer: with the site's dim and causality.
        site: the attention it replaces.
        spec: the name and options that the mixer was built with.
        origin: path within the site -> the original module, on the meta device, for ``restore``.
    """

    def __init__(self, mixer: Mixer, site: Site, spec: Spec, origin: dict[str, nn.Module]):
        super().__init__()
        self.mixer, self.site, self.spec = mixer, site, spec
        self.origin = (origin,)  # a tuple keeps its modules out of the model's
        self.patches = None if site.grid is None else PatchGrid()
        self.on_grid = site.grid is not None and mixer.capabilities.grid and spec.get("ndim", 2) != 1

    def extra_repr(self) -> str:
        """Describe the site and the mixer."""
        return f"{self.site.name}: {self.spec['name']} for {self.site.family}"

    def _grid(self, x: Tensor) -> Options:
        """Return the grid arguments for mixers that take them: the patches of this forward pass, as they lie.

        Raises:
            MixerError: if the grid is unknown, tokens are missing from it, or the mixer belongs to another one.
        """
        if self.patches is None or self.site.grid is None or not (self.on_grid or self.mixer.max_len is not None):
            return {}
        where, patches = self.site.name, x.shape[1] - self.site.prefix
        try:
            grid = self.patches.find(patches)
        except MixerError as why:
            raise MixerError(f"{where}: {why}.") from None
        if grid is None:
            by_hand = "with tokenmix.hosts.given_grid(model, grid=(rows, columns))"
            raise MixerError(
                f"{where}: the patches' rows and columns are unknown; call the whole model, or it {by_hand}."
            )
        if patches != prod(grid):
            made = f"{grid[0]} x {grid[1]} patches were made, and {patches} came here"
            raise MixerError(
                f"{where}: {made}; {self.spec['name']} needs them all: switch off the dropping of patches."
            )
        if self.mixer.max_len is not None and grid != self.site.grid:
            built = "{} x {}".format(*self.site.grid)
            one = f"{self.spec['name']} has parameters per position, for {built} patches"
            raise MixerError(f"{where}: {one}, got {grid[0]} x {grid[1]}; give images of the model's own size.")
        return {"grid": grid, "prefix": self.site.prefix} if self.on_grid else {}

    def _read_mask(self, mask: Tensor | None, x: Tensor, *, causal: bool, window: int | None = None) -> Read:
        rows, queries = x.shape[:2]
        read = read_mask(mask, rows, queries, causal=causal, window=window, where=self.site.name)
        if not isinstance(self.mixer, Attention):  # the reach of other mixers is their own
            read = Read(read.key_mask, None) if read.windowed else read
        elif window is not None and queries > window and read.pairs is None:  # flash attention gets the window apart
            read = Read(read.key_mask, window_mask(queries, causal, window, x.device).expand(rows, -1, -1), True)
        if read.pairs is not None and not self.mixer.capabilities.attn_mask:
            name = self.spec["name"]
            beyond = "gets a mask of pairs of tokens beyond padding and order"
            raise MixerError(f"{self.site.name}: {beyond}, and {name} does not weigh pairs; attention does.")
        return read


class HFAdapter(Adapter):
    """Replace an attention module of transformers: the same call, returning ``(output, None)``."""

    def __init__(self, mixer: Mixer, site: Site, spec: Spec, origin: dict[str, nn.Module], dropout: float = 0.0):
        super().__init__(mixer, site, spec, origin)
        self.layer_idx = site.layer
        self.dropout = nn.Dropout(dropout)
        self.offset_projections = accept_offsets(mixer) if site.traits.adds_positions else ()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: Any = None,
        encoder_position_embeddings: Tensor | None = None,
        past_key_values: Cache | None = None,
        layer_past: Cache | None = None,
        **others: object,
    ) -> tuple[Tensor, None]:
        """Mix (B, T, D).

        As in DETR, its positions are added to the input of the query and key projections; rotary ones are applied
        by the mixer.
        """
        cache = given_cache(self.site.name, cache=cache, past_key_values=past_key_values, layer_past=layer_past)
        for name, value in others.items():
            if hasattr(value, "get_seq_length"):
                known = f"got a cache as {name}, and knows {', '.join(CACHE_NAMES)}"
                raise MixerError(f"{self.site.name}: {known}; this version of transformers has a new name for it.")
        family = self.site.traits
        added = (position_embeddings, encoder_position_embeddings) if family.adds_positions else (None, None)
        if self.site.cross:
            context = encoder_hidden_states if key_value_states is None else key_value_states
            masks = {"attention_mask": attention_mask, "encoder_attention_mask": encoder_attention_mask}
            mask = masks[family.context_mask]
            return self.dropout(self._attend_context(hidden_states, context, mask, added, cache)), None
        if attention_mask is None:
            refuse_packed(position_ids, self.site.name)
        if cache is not None and self.mixer.causal:
            return self.dropout(self._stream(hidden_states, attention_mask, cache, position_ids)), None
        with with_offsets(self, added[0], added[0], hidden_states) as x:
            return self.dropout(self._mix(x, attention_mask, position_ids)), None

    def _mix(self, x: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
        read = self._read_mask(mask, x, causal=self.mixer.causal, window=self.site.window)
        return self.mixer(
            x, key_mask=read.key_mask, attn_mask=read.pairs, positions=self._positions(x, position_ids), **self._grid(x)
        )

    def _attend_context(
        self,
        x: Tensor,
        context: Tensor | None,
        mask: Tensor | None,
        added: tuple[Tensor | None, Tensor | None],
        cache: Cache | None,
    ) -> Tensor:
        if context is None:
            raise MixerError(f"{self.site.name}: attends another sequence and was given none.")
        read = self._read_mask(mask, x, causal=False)
        if cache is not None:
            return self._stream_across(x, context, read, cache)
        with with_offsets(self, *added, x) as x:
            context = context if self.offset_projections or added[1] is None else context + added[1]
            return self.mixer(x, context, key_mask=read.key_mask, attn_mask=read.pairs)

    def _stream_across(self, x: Tensor, context: Tensor, read: Read, cache: Any) -> Tensor:
        """Mix the next queries with a context whose keys and values, or their sums, the cache keeps.

        Mixers that keep no context project it again in each call.
        """
        from .cache import context_layer, tokens_before

        index = self.site.layer or 0
        seen = tokens_before(cache, index, x.shape[1])
        positions = torch.arange(seen, seen + x.shape[1], device=x.device).expand(x.shape[0], -1) if seen else None
        layer = context_layer(cache, index) if self.mixer.capabilities.keeps_context and read.pairs is None else None
        if layer is None:
            return self.mixer(x, context, positions=positions, key_mask=read.key_mask, attn_mask=read.pairs)
        state = (
            self.mixer.init_state(x.shape[0], context=context, context_mask=read.key_mask)
            if layer.state is None
            else layer.state
        )
        y, state = self.mixer.extend(x, state, positions=positions)
        layer.store(state, x.shape[1])
        cache.is_updated[index] = True
        return y

    def _stream(self, x: Tensor, mask: Tensor | None, cache: Cache, position_ids: Tensor | None) -> Tensor:
        """Continue from the state in the cache and store the new one there."""
        from .cache import state_layer

        layer = state_layer(cache, self.site.layer or 0, self.site.name)
        if not self.mixer.capabilities.streaming:
            if layer.get_seq_length():
                no_cache = "has no streaming form; call generate(..., use_cache=False)"
                raise MixerError(f"{self.site.name}: {self.spec['name']} {no_cache}.")
            layer.store(None, x.shape[1])
            return self._mix(x, mask, position_ids)
        read = self._read_mask(mask, x, causal=True, window=self.site.window)
        if read.pairs is not None:
            return self._stream_pairs(x, layer, read, position_ids)
        state = (
            self.mixer.init_state(x.shape[0], device=x.device, dtype=x.dtype) if layer.state is None else layer.state
        )
        y, state = self.mixer.extend(x, state, positions=self._positions(x, position_ids), key_mask=read.key_mask)
        self._check_window(layer.get_seq_length() + x.shape[1])
        layer.store(state, x.shape[1])
        return y

    def _stream_pairs(self, x: Tensor, layer: TokenMixStateLayer, read: Read, position_ids: Tensor | None) -> Tensor:
        """Mix under a mask of pairs in one pass, because a state could not honour it later."""
        if layer.get_seq_length():
            cannot = "cannot honour a mask of pairs with a cache; call with use_cache=False"
            raise MixerError(f"{self.site.name}: {self.spec['name']} {cannot}.")
        layer.store(None, x.shape[1])
        return self.mixer(x, key_mask=read.key_mask, attn_mask=read.pairs, positions=self._positions(x, position_ids))

    def _check_window(self, tokens: int) -> None:
        if self.site.window is not None and tokens > self.site.window and isinstance(self.mixer, Attention):
            raise MixerError(
                f"{self.site.name}: the host attends {self.site.window} tokens back, but attention's state holds all; "
                f"at {tokens} tokens call with use_cache=False, or replace with local, window={self.site.window}."
            )

    def _positions(self, x: Tensor, position_ids: Tensor | None) -> Tensor | None:
        """Return the host's positions for a mixer that rotates queries and keys by them; others count their own."""
        if position_ids is None or not self.site.rotary or not getattr(self.mixer, "positions", None):
            return None
        return position_ids.expand(x.shape[0], -1)


class TimmAdapter(Adapter):
    """Replace timm's ``Attention``: takes ``(x, attn_mask, is_causal)``, returns one tensor; ``proj_drop`` stays."""

    def __init__(self, mixer: Mixer, site: Site, spec: Spec, origin: dict[str, nn.Module], dropout: float = 0.0):
        super().__init__(mixer, site, spec, origin)
        self.proj_drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Mix (B, N, D)."""
        if is_causal and not self.mixer.causal:
            raise MixerError(f"{self.site.name}: is_causal=True, but its mixer was built with causal=False.")
        mask = attn_mask[None] if attn_mask is not None and attn_mask.ndim == 2 else attn_mask
        read = self._read_mask(mask, x, causal=self.mixer.causal)
        return self.proj_drop(self.mixer(x, key_mask=read.key_mask, attn_mask=read.pairs, **self._grid(x)))


class OffsetLinear(nn.Linear):
    """A projection that adds ``offset`` to its input; other projections of the same tokens do not see it."""

    offset: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.offset is None:
            return super().forward(x)
        if self.offset.shape[1] != x.shape[1]:
            got = f"the mixer projects {x.shape[1]} tokens, the host adds positions to {self.offset.shape[1]}"
            raise MixerError(f"{got}; choose another mixer.")
        return super().forward(x + self.offset)


def accept_offsets(mixer: Mixer) -> tuple[str, ...]:
    """Let the projections of queries and keys take offsets; return their names.

    Without such projections, positions are added to the tokens themselves.
    """
    parts = tuple(
        p for p in ("q_proj", "k_proj") if p in mixer.facts.carries and type(getattr(mixer, p, None)) is nn.Linear
    )
    for part in parts:
        mixer.get_submodule(part).__class__ = OffsetLinear
    return parts


@contextmanager
def with_offsets(adapter: HFAdapter, queries: Tensor | None, keys: Tensor | None, x: Tensor) -> Iterator[Tensor]:
    """Add positions in the mixer's projections inside the context; yield the tokens to mix."""
    offsets = {"q_proj": queries, "k_proj": keys}
    for part in adapter.offset_projections:
        adapter.mixer.get_submodule(part).offset = offsets[part]  # type: ignore[assignment]  # OffsetLinear's field
    try:
        yield x if adapter.offset_projections or queries is None else x + queries
    finally:
        for part in adapter.offset_projections:
            adapter.mixer.get_submodule(part).offset = None  # type: ignore[assignment]  # the same field


def torch_adapter(
    attention: nn.MultiheadAttention, mixer: Mixer, site: Site, spec: Spec, origin: dict[str, nn.Module]
) -> nn.Module:
    """Build a ``MultiheadMixer`` that replaces ``nn.MultiheadAttention`` and keeps the original module."""
    with torch.device("meta"):
        adapter: Any = MultiheadMixer(attention.embed_dim, attention.num_heads, batch_first=attention.batch_first)
    adapter.mixer, adapter.site, adapter.spec, adapter.origin = mixer, site, spec, (origin,)
    return adapter


def is_adapter(module: nn.Module) -> bool:
    """Return whether this module replaces attention."""
    return isinstance(module, Adapter) or (hasattr(module, "site") and hasattr(module, "origin"))


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Return every adapter of a model by name."""
    return {name: module for name, module in model.named_modules() if is_adapter(module)}


def check_described(out: object, model: nn.Module) -> None:
    """Refuse to write a folder of a model whose attention an ``AttentionAdapter`` describes."""
    own = [adapter.site.name for adapter in adapters_of(model).values() if adapter.site.adapter is not None]
    if own:
        keep = "torch.save(model.state_dict(), FILE), and load it after the same replace_mixers(..., adapter=...)"
        raise MixerError(f"{out}: a folder holds no AttentionAdapter, which {own[0]} needs; {keep}.")


def site_name(name: str, adapter: Any) -> str:
    """Return the name of the module whose attention an adapter called ``name`` replaces, which may be around it."""
    first = next(iter(adapter.origin[0]))
    return name.removesuffix(first).removesuffix(".")
