"""A host's attention masks as ours: which keys may be attended, and which pairs where that does not say it all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError

LOWEST = -1e4  # an additive mask at or below this means "not attended"; float16's lowest is -65504


class Read(NamedTuple):
    """key_mask (B, S) of the new keys, None: all may be attended; pairs (B, T, S) where the host's mask says more than key_mask and order, else None.

    ``windowed``: what more it says is the host's window.
    """

    key_mask: Tensor | None
    pairs: Tensor | None
    windowed: bool = False


def read_mask(mask: Any, rows: int, queries: int, *, causal: bool, window: int | None = None, where: str = "") -> Read:
    """What a host's mask means for a mixer over ``queries`` new tokens, of which a causal one knows the order.

    Args:
        mask: None; (B, S), 1 or True = may be attended; (B, T, S) or (B, 1, T, S), bool, or float to be added to logits. With a cache S counts the earlier
            tokens too, whose mask the mixer's state knows: only the columns of the new ones are read.
        window: of a host whose tokens attend those less than so many away, itself included.
        where: begins the message of an error.

    Raises:
        MixerError: for heads that differ, for a bias on logits, for a mask that is no tensor, and for one that shows a causal mixer what comes later.
    """
    if mask is None:
        return Read(None, None)
    if not isinstance(mask, Tensor):
        raise MixerError(f"{where}: gets a mask of type {type(mask).__name__}, which mixers cannot read; call model.set_attn_implementation('sdpa').")
    if mask.ndim == 2:
        return _cached(mask, (queries, causal), lambda: Read(mask[:, -queries:].bool() if causal else mask.bool(), None))

    def read() -> Read:
        allowed = _allowed(mask, rows, where)
        return _read_pairs(allowed, queries, causal, window, where) if causal or window is not None else _read_columns(allowed, where)

    return _cached(mask, (rows, queries, causal, window), read)


def _cached(tensor: Any, asked: tuple[Any, ...], find: Callable[[], Any]) -> Any:
    """What is found out about a tensor that all layers of a model get, once: a note on it tells the layers that follow, until it is changed."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return find()
    asked = (*asked, tensor._version)
    known = getattr(tensor, "_tokenmix_read", None)
    if known is None or known[0] != asked:
        known = tensor._tokenmix_read = asked, find()
    return known[1]


def refuse_packed(positions: Tensor | None, where: str) -> None:
    """Several sequences in one row, which positions that begin anew tell where no mask does: flash attention's way, which would mix them here."""
    if positions is None or positions.shape[-1] < 2 or torch.compiler.is_compiling():
        return
    if _cached(positions, (), lambda: bool((positions[..., 1:] <= positions[..., :-1]).any())):
        said = "gets several sequences in one row, by positions that begin anew, and no mask of pairs"
        raise MixerError(f"{where}: {said}; give each a row of its own, or call model.set_attn_implementation('sdpa') and pass use_cache=False.")


def _allowed(mask: Tensor, rows: int, where: str) -> Tensor:
    """(B, T, S), True = may be attended."""
    if mask.ndim == 4:
        if mask.shape[1] != 1:
            raise MixerError(f"{where}: gets a mask of shape {tuple(mask.shape)} with one for each head; mixers take one for all.")
        mask = mask[:, 0]
    if mask.is_floating_point():
        allowed = mask == 0
        if not torch.compiler.is_compiling() and not bool((allowed | (mask <= LOWEST)).all()):
            raise MixerError(f"{where}: gets a mask that adds to logits more than 0 or -inf; mixers take masks, no biases.")
    else:
        allowed = mask.bool()
    return allowed.expand(rows, -1, -1)


def _read_columns(allowed: Tensor, where: str) -> Read:
    """Take a mask apart in which each query may attend the same keys, or says for itself which."""
    if allowed.shape[1] == 1 or allowed.stride(1) == 0:  # one row for all queries
        return Read(allowed[:, 0], None)
    key_mask = allowed.any(1)
    return Read(key_mask, None if _holds(allowed == key_mask[:, None], where) else allowed)


def _read_pairs(allowed: Tensor, queries: int, causal: bool, window: int | None, where: str) -> Read:
    """Take a mask apart in which order or a window counts."""
    new = allowed[:, :, allowed.shape[2] - queries :].expand(-1, queries, -1)
    key_mask = new.diagonal(dim1=1, dim2=2)  # a token attends itself, unless it is padding
    real, ordered = key_mask[..., None], within(queries, causal, window, new.device) & key_mask[:, None]
    same, plain = _holds((new == ordered) | ~real, where), window is None or queries <= window
    if causal and not same and bool((new & ~within(queries, True, None, new.device) & real).any()):
        raise MixerError(f"{where}: gets a mask in which tokens attend later ones, as in a prefix or an image; a causal mixer cannot. Leave this module out.")
    return Read(key_mask, None if same and plain else allowed, same and not plain)


def _holds(condition: Tensor, where: str) -> bool:
    """Whether a condition holds everywhere. Compiled code goes on as if it did, and stops where it does not."""
    if not torch.compiler.is_compiling():
        return bool(condition.all())
    torch._assert_async(condition.all(), f"{where}: gets a mask beyond padding, order and window, which compiled code cannot look into; call it eagerly.")
    return True


def within(queries: int, causal: bool, window: int | None, device: Any) -> Tensor:
    """(T, T): which pairs order and a window allow."""
    at = torch.arange(queries, device=device)
    rows, reach = at[:, None], window or queries + 1
    return (rows < at + reach) & (at <= rows if causal else at < rows + reach)
