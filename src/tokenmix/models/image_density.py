"""An autoregressive density of images, sub-pixel by sub-pixel (Zhai et al. 2021, arXiv 2105.14103, Sec. 5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..mixers import MIXERS, State, mixer_options
from ..mixers.base import chunk_positions, register_state, token_positions
from ..system.config import Json
from .blocks import cycled, evaluating
from .sampling import check_sampling, pick_token
from .trunk import Trunk, check_trunk


@dataclass(frozen=True)
class ImageDensityConfig(Json):
    """A density of images as JSON.

    Args:
        dim: features per sub-pixel.
        size: (H, W) in pixels.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``. ``max_len`` is filled in where a mixer has one, and so is
            ``width`` where a mixer takes the raster as a grid: W C sub-pixels a line.
        layers: number of blocks; default one per spec.
        channels: colours C of a pixel.
        values: values of a sub-pixel, 0 .. values - 1; at most 256.
        norm, positions, tied, init_std: as in ``LMConfig``.
    """

    dim: int
    size: tuple[int, int]
    mixers: tuple[dict[str, Any], ...]
    layers: int | None = None
    channels: int = 3
    values: int = 256
    mlp_ratio: float = 4.0
    norm: str = "pre"
    positions: str | None = "learned"
    tied: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    kind: str = "image_density"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixers", tuple(self.mixers))
        if not isinstance(self.size, (list, tuple)) or len(self.size) != 2 or any(type(n) is not int or n < 1 for n in self.size):
            raise MixerError(f"ImageDensityConfig: size must be two positive integers (H, W), got {self.size!r}.")
        object.__setattr__(self, "size", tuple(self.size))
        check_trunk(self, "dim", "channels", "values")
        if self.values > 256:
            raise MixerError(f"ImageDensityConfig: values must be at most 256, as images are bytes, got {self.values}.")
        if self.kind != "image_density":
            raise MixerError(f"ImageDensityConfig: kind={self.kind!r} is another model's; leave it out.")

    @property
    def line(self) -> int:
        """Sub-pixels in a line of the image, W C."""
        return self.size[1] * self.channels

    @property
    def max_len(self) -> int:
        """Sub-pixels of an image, N = H W C."""
        return self.size[0] * self.line

    def specs(self) -> list[dict[str, Any]]:
        """One mixer spec per layer, with the width of a line where the mixer wants it."""
        return [_with_width(spec, self.line) for spec in cycled(self.mixers, self.layers)]


@register_state
class ImageDensityState(NamedTuple):
    """The mixers' states, one per layer, the next position of each row (B,), and what the model reads there: the last sub-pixel's embedding (B, 1, D)."""

    layers: tuple[State, ...]
    position: Tensor
    last: Tensor


class ImageDensity(Trunk):
    """p(image) = prod_n p(x_n | x_1 .. x_{n-1}) over the N = H W C sub-pixels, each a softmax over ``values``.

    Order is that of the raster with colours interleaved: R, G, B of pixel 0, then of pixel 1, line by line. Embedding and head are one for all colours.
    The input at n is the embedding of sub-pixel n - 1 plus position n; the first input is the zero vector plus position 0.

    Args:
        config: an ``ImageDensityConfig``.
    """

    def __init__(self, config: ImageDensityConfig):
        super().__init__(config, vocab=config.values)
        self.config = config
        limit = self.mixers_max_len()
        if limit is not None and limit < self.max_len:
            raise MixerError(f"ImageDensity: an image has {self.max_len} sub-pixels, a mixer was given max_len={limit}; leave it out of the spec.")

    @property
    def max_len(self) -> int:
        """Sub-pixels of an image, N = H W C."""
        return self.config.max_len

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """An image's (C, H, W)."""
        return self.config.channels, *self.config.size

    def forward(self, tokens: Tensor) -> Tensor:
        """Whole images as tokens (B, N), any integer dtype -> logits (B, N, values); those at n are of sub-pixel n, from those before it."""
        self._check_images(tokens)
        before = self.embed(tokens[:, :-1].long())
        return self.read(torch.cat([self._start(tokens.shape[0]), before], 1), token_positions(tokens, None))

    @torch.no_grad()
    def bits(self, tokens: Tensor) -> Tensor:
        """Bits per dimension of images as tokens (B, N) -> (B,) float64: -1/N sum_n log2 p(x_n | x_<n), summed in float64, without dropout."""
        with evaluating(self):
            logits = self(tokens)
        found = torch.empty(tokens.shape[0], dtype=torch.float64, device=tokens.device)
        for i, (row, image) in enumerate(zip(logits, tokens.long(), strict=True)):  # one by one: 3072 x 256 numbers in float64 are 6 MB
            nats = -row.double().log_softmax(-1).gather(-1, image[:, None])
            found[i] = (nats / log(2)).sum() / self.max_len
        return found

    def init_state(self, batch_size: int) -> ImageDensityState:
        """The state before the first sub-pixel."""
        layers, position = self.empty_states(batch_size)
        return ImageDensityState(layers, position, self._start(batch_size))

    def extend(self, tokens: Tensor, state: ImageDensityState) -> tuple[Tensor, ImageDensityState]:
        """The next L >= 1 sub-pixels (B, L) -> the logits they were predicted with (B, L, values), equal to those of ``forward``, and the new state."""
        self.check_symbols(tokens)
        rows, length = tokens.shape
        if length < 1 or rows != state.last.shape[0]:
            raise MixerError(f"ImageDensity: extend needs tokens of shape ({state.last.shape[0]}, 1 or more) for this state, got {tuple(tokens.shape)}.")
        if rows and not torch.compiler.is_compiling():
            end = int(state.position.max()) + length
            if end > self.max_len:
                raise MixerError(f"ImageDensity: an image has {self.max_len} tokens, this chunk would end at {end}; stop there.")
        embedded = self.embed(tokens.long())
        logits, state = self._advance(torch.cat([state.last, embedded[:, :-1]], 1), state)
        return logits, state._replace(last=embedded[:, -1:])

    def _advance(self, x: Tensor, state: ImageDensityState) -> tuple[Tensor, ImageDensityState]:
        """Read the inputs x (B, L, D) at the next positions."""
        at, after = chunk_positions(state.position, x, None, None)
        logits, layers = self.read_chunk(x, at, state.layers)
        return logits, state._replace(layers=layers, position=after)

    def _start(self, rows: int) -> Tensor:
        return self.embed.weight.new_zeros(rows, 1, self.config.dim)

    def to_tokens(self, images: Tensor) -> Tensor:
        """uint8 images (B, C, H, W) -> tokens (B, N) int64, the raster with colours interleaved."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1:] != self.image_shape:
            wanted = f"(batch, {', '.join(map(str, self.image_shape))})"
            raise MixerError(f"ImageDensity: expects uint8 images of shape {wanted}, got {images.dtype} {tuple(images.shape)}.")
        return images.permute(0, 2, 3, 1).reshape(len(images), self.max_len).long()

    def to_images(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N) -> uint8 images (B, C, H, W)."""
        self._check_images(tokens)
        C, H, W = self.image_shape
        return tokens.to(torch.uint8).reshape(-1, H, W, C).permute(0, 3, 1, 2).contiguous()

    def _check_images(self, tokens: Tensor) -> None:
        self.check_symbols(tokens)
        if tokens.shape[1] != self.max_len:
            C, H, W = self.image_shape
            raise MixerError(f"ImageDensity: an image of {H} x {W} x {C} has {self.max_len} tokens, got {tokens.shape[1]}; give whole images, unshifted.")

    def sample(self, n: int, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int | None = None) -> Tensor:
        """n images, drawn sub-pixel by sub-pixel from a streaming state -> uint8 (n, C, H, W).

        Args:
            temperature: 0 takes the most likely value.
            top_k, top_p: keep the k most likely values, then the fewest that hold probability p.
            seed: makes the images repeatable; default draws from torch's generator.
        """
        if not isinstance(n, int) or n < 0:
            raise MixerError(f"ImageDensity.sample: n must be an integer >= 0, got {n!r}.")
        start = torch.zeros(n, 0, dtype=torch.long, device=self.embed.weight.device)
        return self._draw(start, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

    def complete(
        self, images: Tensor, rows: int, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int | None = None
    ) -> Tensor:
        """The first ``rows`` lines of pixels of uint8 images (B, C, H, W) as they are, the rest drawn as by ``sample``. What stands below is not read."""
        tokens, height = self.to_tokens(images), self.config.size[0]
        if not isinstance(rows, int) or not 0 <= rows <= height:
            raise MixerError(f"ImageDensity.complete: rows must be an integer in 0..{height}, the height of the images, got {rows!r}.")
        return self._draw(tokens[:, : rows * self.config.line], temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

    @torch.no_grad()
    def _draw(self, tokens: Tensor, *, temperature: float, top_k: int | None, top_p: float | None, seed: int | None) -> Tensor:
        """Images that begin with tokens (B, L)."""
        check_sampling(temperature, top_k, top_p)
        generator = None if seed is None else torch.Generator(tokens.device).manual_seed(seed)
        out, left = [tokens], self.max_len - tokens.shape[1]
        with evaluating(self):
            state = self.init_state(len(tokens))
            if left and tokens.shape[1]:
                _, state = self.extend(tokens, state)
            for _ in range(left if len(tokens) else 0):
                logits, state = self._advance(state.last, state)
                token = pick_token(logits[:, -1], temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                state = state._replace(last=self.embed(token))
                out.append(token)
        return self.to_images(torch.cat(out, 1) if len(tokens) else tokens.new_zeros(0, self.max_len))


def _with_width(spec: dict[str, Any], line: int) -> dict[str, Any]:
    """The spec with the tokens of a line, where the mixer takes a raster of two dimensions and the spec leaves its width open."""
    cls = MIXERS.get(spec.get("name", "")) if isinstance(spec, dict) else None
    options = mixer_options(cls) if cls is not None else {}
    if "width" not in options or spec.get("ndim", options.get("ndim")) != 2:
        return spec
    return {"width": line, **spec}
