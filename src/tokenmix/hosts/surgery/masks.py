"""Translate a host's attention masks: which keys may be attended, and which pairs if that does not suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import MixerError

LOWEST = -1e4  # an additive mask at or below this means "not attended"; float16's lowest is -65504


class Read(NamedTuple):
    """Hold a host's mask as a mixer takes it.

    Args:
        key_mask: (B, S) of the new keys; None: all may be attended.
        pairs: (B, T, S) if the host's mask says more than key_mask and order do, else None.
        windowed: what it says beyond these is the host's window.
    """

    key_mask: Tensor | None
    pairs: Tensor | None
    windowed: bool = False


def read_mask(
    mask: Tensor | None, rows: int, queries: int, *, causal: bool, window: int | None = None, where: str = ""
) -> Read:
    """Translate a host's mask for a mixer over ``queries`` new tokens; a causal mixer knows their order.

    Args:
        mask: None; (B, S), 1 or True = may be attended; (B, T, S) or (B, 1, T, S), bool, or float to be added to
            logits. With a cache S counts the earlier tokens too. The mixer's state knows their mask, so only the
            columns of the new ones are read.
        window: of a host whose tokens attend only tokens less than this far away, themselves included.
        where: starts the message of an error.

    Raises:
        MixerError: if heads differ, the mask is a bias on logits, it is no tensor, or it shows later tokens to a
            causal mixer.
    """
    if mask is None:
        return Read(None, None)
    if not isinstance(mask, Tensor):
        kind = f"a mask of type {type(mask).__name__}"
        raise MixerError(f"{where}: gets {kind}, which mixers cannot read; call model.set_attn_implementation('sdpa').")
    if mask.ndim == 2:
        return _compute_once(
            mask, (queries, causal), lambda: Read(mask[:, -queries:].bool() if causal else mask.bool(), None)
        )

    def read() -> Read:
        allowed = _as_allowed_pairs(mask, rows, where)
        return (
            _read_pairs(allowed, queries, causal, window, where)
            if causal or window is not None
            else _read_columns(allowed, where)
        )

    return _compute_once(mask, (rows, queries, causal, window), read)


def _compute_once(tensor: Any, asked: tuple[object, ...], find: Callable[[], Any]) -> Any:
    """Cache results that all layers of a model compute from the same tensor.

    The result is stored on the tensor and holds until the tensor changes.
    """
    if torch.compiler.is_compiling() or tensor.is_inference():
        return find()
    asked = (*asked, tensor._version)
    known = getattr(tensor, "_tokenmix_read", None)
    if known is None or known[0] != asked:
        known = tensor._tokenmix_read = asked, find()
    return known[1]


def refuse_packed(positions: Tensor | None, where: str) -> None:
    """Refuse several sequences packed in one row, shown by positions that restart, without a mask.

    Flash attention reads them so; a mixer would mix them.
    """
    if positions is None or positions.shape[-1] < 2 or torch.compiler.is_compiling():
        return
    if _compute_once(positions, (), lambda: bool((positions[..., 1:] <= positions[..., :-1]).any())):
        packed = "gets several sequences in one row, by positions that restart, and no mask of pairs"
        instead = "call model.set_attn_implementation('sdpa') and pass use_cache=False"
        raise MixerError(f"{where}: {packed}; give each a row of its own, or {instead}.")


def _as_allowed_pairs(mask: Tensor, rows: int, where: str) -> Tensor:
    """Return the mask as booleans (B, T, S), True = may be attended."""
    if mask.ndim == 4:
        if mask.shape[1] != 1:
            shape = f"a mask of shape {tuple(mask.shape)} with one map per head"
            raise MixerError(f"{where}: gets {shape}; mixers take one for all heads.")
        mask = mask[:, 0]
    if mask.is_floating_point():
        allowed = mask == 0
        if not torch.compiler.is_compiling() and not bool((allowed | (mask <= LOWEST)).all()):
            only = "gets a mask that adds numbers other than 0 and -inf to logits"
            raise MixerError(f"{where}: {only}; mixers take masks, not biases.")
    else:
        allowed = mask.bool()
    return allowed.expand(rows, -1, -1)


def _read_columns(allowed: Tensor, where: str) -> Read:
    """Read a mask in which all queries may attend the same keys, or each query different ones."""
    if allowed.shape[1] == 1 or allowed.stride(1) == 0:  # one row for all queries
        return Read(allowed[:, 0], None)
    key_mask = allowed.any(1)
    same = allowed == key_mask[:, None]
    if allowed.shape[1] == allowed.shape[2]:  # DeBERTa's padding attends nothing itself
        same = same | ~(key_mask[..., None] | allowed.any(2, keepdim=True))
    return Read(key_mask, None if _holds_everywhere(same, where) else allowed)


def _read_pairs(allowed: Tensor, queries: int, causal: bool, window: int | None, where: str) -> Read:
    """Read a mask in which order or a window matters."""
    new = allowed[:, :, allowed.shape[2] - queries :].expand(-1, queries, -1)
    key_mask = new.diagonal(dim1=1, dim2=2)  # a token attends itself unless it is padding
    real, ordered = key_mask[..., None], window_mask(queries, causal, window, new.device) & key_mask[:, None]
    same, plain = _holds_everywhere((new == ordered) | ~real, where), window is None or queries <= window
    if causal and not same and bool((new & ~window_mask(queries, True, None, new.device) & real).any()):
        later = "gets a mask in which tokens attend later ones, as in a prefix or an image"
        raise MixerError(f"{where}: {later}; a causal mixer cannot. Leave this module out.")
    return Read(key_mask, None if same and plain else allowed, same and not plain)


def _holds_everywhere(condition: Tensor, where: str) -> bool:
    """Return whether a condition holds everywhere. Compiled code assumes it, and stops where it fails."""
    if not torch.compiler.is_compiling():
        return bool(condition.all())
    beyond = "gets a mask beyond padding, order and window, which compiled code cannot inspect"
    torch._assert_async(condition.all(), f"{where}: {beyond}; call it eagerly.")
    return True


def window_mask(queries: int, causal: bool, window: int | None, device: torch.device) -> Tensor:
    """Return the pairs that order and a window allow, (T, T)."""
    at = torch.arange(queries, device=device)
    rows, reach = at[:, None], window or queries + 1
    return (rows < at + reach) & (at <= rows if causal else at < rows + reach)
