"""The numbers behind the pictures of a vision model: filters, biases, keys, relative attention, on the grid of patches.

Shapes: B images, h heads, T tokens of which the first ``prefix`` are not patches, a grid of H rows and W columns of
patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...functional.layout.heads import by_head
from ...mixers import Inputs, Mixer
from ...mixers.attention import Attention
from ...models import MAE, ViT, evaluation_mode
from ...types import Options
from .biases import extra_weights, has_pair_bias

Item = TypeVar("Item")
CHUNK = 8  # images at a time where every pair of tokens is kept


class Layer(NamedTuple):
    """A mixer with its input while the model read the images: x (B, T, D) and the keyword arguments."""

    mixer: Any
    x: Tensor
    given: Options


class Relative(NamedTuple):
    """Mean attention by relative offset.

    ``means`` (layers, h, 2 H - 1, 2 W - 1) float64, of the model's ``layers``; ``counts`` (2 H - 1, 2 W - 1) pairs.
    """

    layers: list[int]
    means: Tensor
    counts: Tensor


class Sparsity(NamedTuple):
    """Three measures for each head's filter (h,).

    Hoyer's measure and Gini's index are 0 for a flat filter and 1 (Gini: 1 - 1 / n) for one tap; entropy / log n goes
    from 1 to 0.
    """

    hoyer: Tensor
    gini: Tensor
    entropy: Tensor


def check_vit(model: nn.Module, who: str) -> ViT:
    """Return the model, or the encoder of a masked autoencoder, or refuse it if it is not a ViT."""
    if isinstance(model, MAE):
        return model.encoder
    if not isinstance(model, ViT):
        raise MixerError(
            f"{who}: pictures of images need a ViT, got {type(model).__name__}; for text see "
            + "tokenmix.lab.report.pictures."
        )
    return model


def grid_of(model: ViT, images: Tensor) -> tuple[int, int]:
    """Return the rows and columns of patches of these images."""
    rows, columns = (-(-n // model.config.patch) for n in images.shape[2:])
    return rows, columns


def look_into(model: nn.Module, images: Tensor) -> list[Layer]:
    """Return every layer's mixer and its input when the model reads images (B, C, H, W), without dropout."""
    model, seen = check_vit(model, "look_into"), []

    def hook(mixer: nn.Module, args: tuple, given: Options) -> None:
        seen.append(Layer(mixer, args[0].detach(), given))

    hooks = [block.mixer.register_forward_pre_hook(hook, with_kwargs=True) for block in model.blocks]
    try:
        with evaluate_without_gradients(model):
            model.forward_features(images)
    finally:
        for handle in hooks:
            handle.remove()
    return seen


@contextmanager
def evaluate_without_gradients(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients inside; the model's mode is restored afterwards."""
    with torch.no_grad(), evaluation_mode(model):
        yield


def on_grid(values: Tensor, grid: tuple[int, int], prefix: int) -> Tensor:
    """Arrange (B, T, n) values of tokens as maps (B, n, H, W) of the patches."""
    return values[:, prefix:].transpose(1, 2).unflatten(2, grid)


def bias_around(mixer: Any, grid: tuple[int, int], prefix: int, query: int) -> Tensor:
    """Compute exp(w) - 1 of AFT-full or AFT-local from one query patch to all patches (H, W).

    It is 0 outside of a window, NaN where keys outside are not attended.
    """
    if not has_pair_bias(mixer):
        others = "aft_full, and aft_local with window >= 1, have one"
        raise MixerError(f"bias_around: {type(mixer).__name__} has no bias per pair of positions; {others}.")
    n = grid[0] * grid[1]
    if not 0 <= query < n:
        raise MixerError(
            f"bias_around: query must be a patch 0..{n - 1} of a grid of {grid[0]} x {grid[1]}, got {query}."
        )
    if prefix + n > mixer.max_len:
        asked = f"{prefix} and a grid of {grid[0]} x {grid[1]}"
        raise MixerError(f"bias_around: {type(mixer).__name__} has biases for {mixer.max_len} tokens, got {asked}.")
    at = torch.tensor([[prefix + query]], device=next(mixer.parameters()).device)
    keys = torch.arange(prefix, prefix + n, device=at.device)[None]
    return extra_weights(mixer, at, keys)[0, 0].view(grid)


def sparsity(extra: Tensor) -> Sparsity:
    """Measure how close each filter of exp(w) - 1 (h, s, ...) is to one tap, from |exp(w) - 1|; a zero filter counts as
    flat.

    hoyer = (sqrt n - L1 / L2) / (sqrt n - 1) (Hoyer 2004); gini = sum_i (2 i - n - 1) e_i / (n sum e), e in ascending
    order; entropy of e / sum e, over log n.
    """
    e = extra.double().abs().flatten(1)
    n = e.shape[1]
    if n < 2:
        raise MixerError(f"sparsity: a filter of one tap has no sparsity, got filters of shape {tuple(extra.shape)}.")
    p = torch.where(e.sum(1, keepdim=True) > 0, e, 1.0)
    p = p / p.sum(1, keepdim=True)
    hoyer = (n**0.5 - p.square().sum(1).rsqrt()) / (n**0.5 - 1)
    rank = 2 * torch.arange(1, n + 1, device=e.device) - n - 1
    gini = (p.sort(1).values * rank).sum(1) / n
    entropy = -(p * p.clamp_min(1e-300).log()).sum(1) / math.log(n)
    return Sparsity(hoyer, gini, entropy)


def key_maps(model: nn.Module, images: Tensor) -> dict[int, Tensor]:
    """Compute the keys of every layer that has one per token, as maps (B, n, H, W) by layer.

    AFT-conv has one key per head, n = heads. Other AFT mixers, Hydra and linear attention without heads have one per
    channel, n = D. Where a head's key is a vector, as in softmax attention, the map is its norm, n = key heads.
    """
    found = {}
    for i, layer in enumerate(look_into(model, images)):
        project, T = getattr(layer.mixer, "k_proj", None), layer.x.shape[1]
        if project is not None:
            with torch.no_grad():
                keys = project(layer.x)
            if keys.shape[:2] == layer.x.shape[:2]:
                found[i] = on_grid(_per_head(layer.mixer, keys), grid_of(model, images), T - _patches(model, images))  # type: ignore[arg-type]  # mixers all
    if not found:
        raise MixerError(
            f"key_maps: no layer projects a key for each token ({_kinds(model)}); AFT, Hydra and attention do."
        )
    return found


def _per_head(mixer: Mixer, keys: Tensor) -> Tensor:
    heads = getattr(mixer, "kv_heads", None) or getattr(mixer, "heads", None)
    width = keys.shape[-1] // heads if heads and keys.shape[-1] % heads == 0 else 1
    return keys if width == 1 else keys.unflatten(-1, (heads, width)).norm(dim=-1)


def _patches(model: ViT, images: Tensor) -> int:
    rows, columns = grid_of(model, images)
    return rows * columns


def _kinds(model: Any) -> str:
    return ", ".join(sorted({type(block.mixer).__name__ for block in model.blocks}))


def attention_weights(mixer: Attention, x: Tensor, **given: Any) -> Tensor:
    """Compute softmax_s(scale q_t . k_s) of softmax attention, (B, h, T, T) in float64."""
    given = {"positions": None, "key_mask": None, "attn_mask": None, **given}
    (q, k, _), options = mixer.functional_args(Inputs(x, **given))
    q, k = (by_head(p.double(), n) for p, n in ((q, mixer.heads), (k, mixer.kv_heads)))
    k = k.repeat_interleave(mixer.heads // mixer.kv_heads, 1)
    scale = q.shape[-1] ** -0.5 if mixer.scale is None else mixer.scale
    return (scale * q @ k.mT).softmax(-1)


def relative_sums(weights: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Sum weights (B, h, P, P) between patches over images and over all pairs of one offset; count the pairs.

    The sums have the shape (h, 2 H - 1, 2 W - 1). The offset (dy, dx) of the key from the query is at [dy + H - 1, dx +
    W - 1].
    """
    rows, columns = grid
    y, x = (axis.flatten() for axis in torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    place = (
        ((y - y[:, None] + rows - 1) * (2 * columns - 1) + x - x[:, None] + columns - 1).flatten().to(weights.device)
    )
    size = (2 * rows - 1) * (2 * columns - 1)
    summed = weights.double().sum(0).flatten(1)
    sums = summed.new_zeros(summed.shape[0], size).index_add_(1, place, summed)
    counts = len(weights) * torch.bincount(place, minlength=size)
    return sums.view(-1, 2 * rows - 1, 2 * columns - 1), counts.view(2 * rows - 1, 2 * columns - 1)


def average_relative_attention(model: nn.Module, images: Tensor) -> Relative:
    """Average softmax attention's weights at each relative offset over images and queries (AFT, Fig. 1).

    The result is 12 x 6 x 27 x 27 for DeiT-small at 224. Class token and registers are dropped after the softmax, so a
    row of patches need not sum to 1. Each mean is over the pairs of patches that have this offset, (H - |dy|) (W -
    |dx|) of them per image. Exact in float64; images are read a few at a time, so their number is not limited by
    memory.

    Raises:
        MixerError: no layer is softmax attention, or such layers differ in their number of heads.
    """
    model = check_vit(model, "average_relative_attention")
    chosen = [i for i, block in enumerate(model.blocks) if isinstance(block.mixer, Attention)]
    if not chosen:
        other = "tokenmix.lab.report.biases.filters shows AFT-conv's bias"
        raise MixerError(f"average_relative_attention: no layer is softmax attention ({_kinds(model)}); {other}.")
    if len({model.blocks[i].mixer.heads for i in chosen}) > 1:
        heads = ", ".join(str(model.blocks[i].mixer.heads) for i in chosen)
        raise MixerError(f"average_relative_attention: the layers differ in heads ({heads}).")
    if not len(images):
        raise MixerError("average_relative_attention: expects at least one image, got none.")
    grid, skip, parts = grid_of(model, images), model.config.prefix, []
    for part in images.split(CHUNK):
        layers = look_into(model, part)
        with torch.no_grad():
            found = [
                relative_sums(attention_weights(layers[i].mixer, layers[i].x)[:, :, skip:, skip:], grid) for i in chosen
            ]
        parts.append((torch.stack([sums for sums, _ in found]), found[0][1]))
    counts = sum((n for _, n in parts), torch.zeros_like(parts[0][1]))
    return Relative(chosen, sum((s for s, _ in parts), torch.zeros_like(parts[0][0])) / counts, counts)


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """Return at most ``most`` of the items, evenly spread, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(j * (len(items) - 1) / (most - 1))] for j in range(most)]
