"""The position biases of a trained model: exp(w) - 1, the extra weight of a pair of positions, per layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...mixers import Mixer
from .figures import Picture, heat_map
from .image_grid import image_grid

SHOWN = 96
LAYERS = 6
HEADS, ACROSS = 16, 8


def bias_pictures(name: str, model: nn.Module, tell: Callable[[str], None] = lambda what: None) -> list[Picture]:
    """Draw one picture for each of at most six layers with a position bias, spread evenly.

    ``tell`` is called with a line of progress before each.
    """
    found = [
        (i, block.mixer)
        for i, block in enumerate(getattr(model, "blocks", []))
        if has_filters(block.mixer) or has_pair_bias(block.mixer)
    ]
    if len(found) > LAYERS:
        found = [found[round(j * (len(found) - 1) / (LAYERS - 1))] for j in range(LAYERS)]
    pictures = []
    for layer, mixer in found:
        tell(f"position biases of layer {layer}")
        pictures.append(_picture(name, layer, mixer))
    return pictures


def has_filters(mixer: object) -> bool:
    """Return whether the mixer weighs neighbours by filters: it has ``kernel()``, (heads, taps ...)."""
    return callable(getattr(mixer, "kernel", None))


def _is_signed(mixer: object) -> bool:
    """Return whether the filters are added to the weights and not to their logarithms."""
    return getattr(mixer, "filters", "exp") == "signed"


def has_pair_bias(mixer: object) -> bool:
    """Return whether the mixer learns a bias for pairs of positions.

    It then has ``pair_log_weights(queries, keys)`` and a window, if any, that is not empty.
    """
    return callable(getattr(mixer, "pair_log_weights", None)) and getattr(mixer, "window", None) != 0


def _picture(name: str, layer: int, mixer: Mixer) -> Picture:
    pairs = has_pair_bias(mixer)
    extra = pair_bias(mixer) if pairs else filters(mixer)
    what = "w" if _is_signed(mixer) else "exp(w) - 1"
    known = extra[extra.isfinite()]
    low, high = float(known.min()), float(known.max())
    if extra.ndim == 3:
        return _heads(name, layer, extra, what, f"{low:.3f} to {high:.3f}")
    x, y = ("key position", "query position") if pairs else ("tap", "head")
    kind = "pairs of positions" if pairs else "taps of each head's filter"
    alt = f"Heat map of {what} over {kind}, layer {layer} of {name}; values from {low:.3f} to {high:.3f}."
    return heat_map(
        extra,
        title=f"{name}, layer {layer}",
        x=x,
        y=y,
        alt=alt,
        caption=f"{name}, layer {layer}: {low:.3f} to {high:.3f}",
    )


def pair_bias(mixer: Any) -> Tensor:
    """Compute exp(w) - 1 of the first positions (T, T): 0 outside of a window, NaN (drawn blank) where nothing is
    attended.
    """
    n = min(SHOWN, mixer.max_len or SHOWN)  # a bias that is a function has no longest sequence
    at = torch.arange(n)[None]
    return extra_weights(mixer, at, at)[0]


def extra_weights(mixer: Any, queries: Tensor, keys: Tensor) -> Tensor:
    """Compute exp(w) - 1 for queries and keys at these positions, (B, T, S); NaN where no such pair is attended."""
    with torch.no_grad():
        w = mixer.pair_log_weights(queries, keys)
    return torch.expm1(w).masked_fill(w == -torch.inf, torch.nan)


def _heads(name: str, layer: int, extra: Tensor, what: str, values: str) -> Picture:
    """Draw a map for each of the first heads (h, s, s), eight a row, on one scale."""
    shown = list(extra[:HEADS])
    rows = [shown[i : i + ACROSS] for i in range(0, len(shown), ACROSS)]
    cells = [[*row, *[None] * (len(rows[0]) - len(row))] for row in rows]
    names = [f"heads {i * ACROSS}+" for i in range(len(rows))]
    alt = f"Heat maps of {what} over the taps of each head's filter, layer {layer} of {name}; values from {values}."
    caption = f"{name}, layer {layer}: {values}"
    return image_grid(
        cells,
        rows=names,
        columns=[str(i) for i in range(len(rows[0]))],
        bar=what,
        alt=alt,
        caption=caption,
        title=f"{name}, layer {layer}",
    )


def filters(mixer: Any) -> Tensor:
    """Compute exp(w) - 1 of the filters, or w where they are signed.

    In one dimension they are (heads, taps), else each head's (middle) plane (heads, s, s).
    """
    with torch.no_grad():
        extra = mixer.kernel().double()
        extra = extra if _is_signed(mixer) else torch.expm1(extra)
    while extra.ndim > 3:
        extra = extra[:, extra.shape[1] // 2]
    return extra
