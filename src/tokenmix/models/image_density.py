"""An autoregressive density of images, sub-pixel by sub-pixel (Zhai et al. 2021, arXiv 2105.14103, Sec. 5.1)."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import MixerError
from ..mixers import MIXERS, State, mixer_options
from ..mixers.base import chunk_positions, register_state, token_positions
from ..system.config import Json
from ..system.properties import named_errors
from ..types import Spec
from .blocks import cycle_specs, evaluation_mode
from .layers import MLPKind, NormType
from .sampling import FiniteSteps, check_sampling, pick_token, seeded_generator
from .trunk import Trunk, check_trunk

POSITIONS = ("learned", "sinusoidal", None)


@dataclass(frozen=True)
class ImageDensityConfig(Json):
    """A density model of images as JSON.

    Args:
        dim: features per sub-pixel, at least 1.
        size: (H, W) of the images in pixels.
        mixers: one spec per layer, or a shorter list repeated cyclically over ``layers``. ``max_len`` is filled in if a
            mixer has one, and so is ``width`` (W C sub-pixels per line) if a mixer takes the raster as a grid.
        layers: number of blocks; None: one per spec.
        channels: colours C of a pixel, at least 1.
        values: values of a sub-pixel, 0 .. values - 1; from 1 to 256.
        mlp_ratio: hidden width of the MLPs as a multiple of ``dim``.
        norm: "pre" (with a final norm before the head) or "post".
        norm_type: "layer" for LayerNorm, "rms" for RMSNorm, both with eps 1e-5.
        mlp: "gelu", "relu2" or "swiglu"; see ``MLP``.
        positions: what is added to the embedding: "learned" vectors, fixed "sinusoidal" ones, or None.
        tied: whether the head shares the embedding's weight.
        dropout: dropout rate in [0, 1), of the embedded sub-pixels and each branch.
        init_std: standard deviation of the initial weights, as in ``LMConfig``.
    """

    dim: int
    size: tuple[int, int]
    mixers: tuple[Spec, ...]
    layers: int | None = None
    channels: int = 3
    values: int = 256
    mlp_ratio: float = 4.0
    norm: str = "pre"
    norm_type: NormType = "layer"
    mlp: MLPKind = "gelu"
    positions: str | None = "learned"
    tied: bool = False
    dropout: float = 0.0
    init_std: float = 0.02
    kind: ClassVar[str] = "image_density"
    logit_cap: ClassVar[float | None] = None
    mlp_bias: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixers", tuple(self.mixers))
        if (
            not isinstance(self.size, (list, tuple))
            or len(self.size) != 2
            or any(type(n) is not int or n < 1 for n in self.size)
        ):
            raise MixerError(f"ImageDensityConfig: size must be two positive integers (H, W), got {self.size!r}.")
        object.__setattr__(self, "size", tuple(self.size))
        if self.positions not in POSITIONS:
            raise MixerError(
                f"ImageDensityConfig: positions={self.positions!r} is unknown; choose 'learned', 'sinusoidal' or null."
            )
        check_trunk(self, "dim", "channels", "values")
        if self.values > 256:
            raise MixerError(f"ImageDensityConfig: values must be at most 256, as images are bytes, got {self.values}.")

    @property
    def line(self) -> int:
        """Return the sub-pixels in a line of the image, W C."""
        return self.size[1] * self.channels

    @property
    def max_len(self) -> int:
        """Return the sub-pixels of an image, N = H W C."""
        return self.size[0] * self.line

    def specs(self) -> list[Spec]:
        """Return one mixer spec per layer, with the width of a line if the mixer has this option."""
        return [_with_width(spec, self.line) for spec in cycle_specs(self.mixers, self.layers)]


@register_state
class ImageDensityState(NamedTuple):
    """The state of a partly read image.

    Attributes:
        layers: the mixers' states, one per layer.
        position: next position of each row (B,).
        last: the input at that position, the last sub-pixel's embedding (B, 1, D).
    """

    layers: tuple[State, ...]
    position: Tensor
    last: Tensor


@named_errors
class ImageDensity(Trunk):
    """p(image) = prod_n p(x_n | x_1 .. x_{n-1}) over the N = H W C sub-pixels, each a softmax over ``values``.

    The order is the raster with colours interleaved: R, G, B of pixel 0, then of pixel 1, line by line. All colours
    share one embedding and one head. The input at n is the embedding of sub-pixel n - 1 plus position n; the first
    input is the zero vector plus position 0.

    Args:
        config: an ``ImageDensityConfig``.
    """

    config_class = ImageDensityConfig
    pipeline_tags = None, "unconditional-image-generation"

    def __init__(self, config: ImageDensityConfig):
        super().__init__(config, vocab=config.values)
        self.config = config
        limit = self.mixers_max_len()
        if limit is not None and limit < self.max_len:
            raise MixerError(
                f"ImageDensity: an image has {self.max_len} sub-pixels, but a mixer has max_len={limit}; "
                + "leave it out of the spec."
            )

    @property
    def max_len(self) -> int:
        """Return the sub-pixels of an image, N = H W C."""
        return self.config.max_len

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Return an image's (C, H, W)."""
        return self.config.channels, *self.config.size

    def forward(self, tokens: Tensor) -> Tensor:
        """Map whole images as tokens (B, N) of any integer dtype to logits (B, N, values).

        The logits at n predict sub-pixel n from those before it.
        """
        self._check_images(tokens)
        return self._read(tokens[:, :-1])

    def _read(self, before: Tensor) -> Tensor:
        """Compute the logits (B, L + 1, values) of the first L + 1 sub-pixels from the first L, without a state."""
        x = torch.cat([self._start(before.shape[0]), self.embed(before.long())], 1)
        return self.read(self._add_positions(x, token_positions(x, None)))

    @torch.no_grad()
    def bits(self, tokens: Tensor) -> Tensor:
        """Compute the bits per dimension (B,), float64, of images as tokens (B, N).

        They are -1/N sum_n log2 p(x_n | x_<n), summed in float64, without dropout.
        """
        with evaluation_mode(self):
            logits = self(tokens)
        found = torch.empty(tokens.shape[0], dtype=torch.float64, device=tokens.device)
        for i, (row, image) in enumerate(
            zip(logits, tokens.long(), strict=True)
        ):  # one at a time: 3072 x 256 float64 are 6 MB
            nats = -row.double().log_softmax(-1).gather(-1, image[:, None])
            found[i] = (nats / log(2)).sum() / self.max_len
        return found

    def init_state(self, batch_size: int) -> ImageDensityState:
        """Return the state before the first sub-pixel."""
        layers, position = self.empty_states(batch_size)
        return ImageDensityState(layers, position, self._start(batch_size))

    def extend(self, tokens: Tensor, state: ImageDensityState) -> tuple[Tensor, ImageDensityState]:
        """Read the next L >= 1 sub-pixels (B, L).

        Returns the logits (B, L, values) that predict them, and the new state. The logits equal those of ``forward``.
        """
        self.check_symbols(tokens)
        rows, length = tokens.shape
        if length < 1 or rows != state.last.shape[0]:
            raise MixerError(
                f"ImageDensity: for this state, extend needs tokens of shape ({state.last.shape[0]}, 1 or more), got "
                + f"{tuple(tokens.shape)}."
            )
        if rows and not torch.compiler.is_compiling():
            end = int(state.position.max()) + length
            if end > self.max_len:
                raise MixerError(
                    f"ImageDensity: an image has {self.max_len} tokens, but this chunk would end at {end}; "
                    + "give a shorter one."
                )
        embedded = self.embed(tokens.long())
        logits, state = self._advance(torch.cat([state.last, embedded[:, :-1]], 1), state)
        return logits, state._replace(last=embedded[:, -1:])

    def _advance(self, x: Tensor, state: ImageDensityState) -> tuple[Tensor, ImageDensityState]:
        """Read the inputs x (B, L, D) at the next positions."""
        at, after = chunk_positions(state.position, x, None, None)
        logits, layers = self.read_chunk(self._add_positions(x, at), state.layers)
        return logits, state._replace(layers=layers, position=after)

    def _add_positions(self, x: Tensor, at: Tensor) -> Tensor:
        return x if self.positions is None else x + self.positions(at).to(x.dtype)

    def _start(self, rows: int) -> Tensor:
        return self.embed.weight.new_zeros(rows, 1, self.config.dim)

    def to_tokens(self, images: Tensor) -> Tensor:
        """Convert uint8 images (B, C, H, W) to tokens (B, N) int64, the raster with colours interleaved."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1:] != self.image_shape:
            wanted = f"(batch, {', '.join(map(str, self.image_shape))})"
            raise MixerError(
                f"ImageDensity: expects uint8 images of shape {wanted}, got {images.dtype} {tuple(images.shape)}."
            )
        return images.permute(0, 2, 3, 1).reshape(len(images), self.max_len).long()

    def to_images(self, tokens: Tensor) -> Tensor:
        """Convert tokens (B, N) to uint8 images (B, C, H, W)."""
        self._check_images(tokens)
        C, H, W = self.image_shape
        return tokens.to(torch.uint8).reshape(-1, H, W, C).permute(0, 3, 1, 2).contiguous()

    def _check_images(self, tokens: Tensor) -> None:
        self.check_symbols(tokens)
        if tokens.shape[1] != self.max_len:
            C, H, W = self.image_shape
            raise MixerError(
                f"ImageDensity: an image of {H} x {W} x {C} has {self.max_len} tokens, got {tokens.shape[1]}; "
                + "give whole images, unshifted."
            )

    def sample(
        self,
        n: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Sample n images, sub-pixel by sub-pixel from a streaming state, uint8 (n, C, H, W).

        With a mixer that has no streaming form, the image so far is read again for each sub-pixel.

        Args:
            temperature: divides the logits; 0 takes the most likely value.
            top_k: keep only the k most likely values; None: all.
            top_p: then keep only the fewest values that together have probability p; None: all.
            seed: makes the images repeatable; None: torch's generator is used.
        """
        if not isinstance(n, int) or n < 0:
            raise MixerError(f"ImageDensity.sample: n must be an integer >= 0, got {n!r}.")
        start = torch.zeros(n, 0, dtype=torch.long, device=self.embed.weight.device)
        return self._draw(start, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)

    def complete(
        self,
        images: Tensor,
        rows: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Keep the first ``rows`` lines of pixels of uint8 images (B, C, H, W) and sample the rest as ``sample`` does.

        The lines below are not read.
        """
        tokens, height = self.to_tokens(images), self.config.size[0]
        if not isinstance(rows, int) or not 0 <= rows <= height:
            raise MixerError(
                f"ImageDensity.complete: rows must be an integer in 0..{height}, the height of the images, got "
                + f"{rows!r}."
            )
        return self._draw(
            tokens[:, : rows * self.config.line], temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
        )

    @torch.no_grad()
    def _draw(
        self, tokens: Tensor, *, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
    ) -> Tensor:
        """Sample images that begin with tokens (B, L)."""
        check_sampling(temperature, top_k, top_p)
        generator = seeded_generator(seed, tokens.device)
        known, image = tokens.shape[1], tokens.new_zeros(len(tokens), self.max_len)
        image[:, :known] = tokens
        steps = FiniteSteps("ImageDensity", f"logits of new sub-pixel {{step}} (behind {known} given ones)")
        with evaluation_mode(self):
            state = self.init_state(len(tokens)) if self.streams else None
            if state is not None and 0 < known < self.max_len:
                _, state = self.extend(tokens, state)
            for i in range(known, self.max_len if len(tokens) else known):
                if state is None:
                    logits = self._read(image[:, :i])[:, -1]
                else:
                    chunk, state = self._advance(state.last, state)
                    logits = chunk[:, -1]
                logits = steps.logits(logits)
                token = pick_token(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
                image[:, i : i + 1] = token
                if state is not None:
                    state = state._replace(last=self.embed(token))
        steps.finish()
        return self.to_images(image)


def _with_width(spec: Spec, line: int) -> Spec:
    """Return the spec with the tokens per line as its width.

    It is added if the mixer takes a raster of two dimensions and the spec does not give it.
    """
    cls = MIXERS.get(spec.get("name", "")) if isinstance(spec, dict) else None
    options = mixer_options(cls) if cls is not None else {}
    if "width" not in options or spec.get("ndim", options.get("ndim")) != 2:
        return spec
    return {"width": line, **spec}
