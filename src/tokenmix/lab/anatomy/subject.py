"""A Vision Transformer of any library, and what its tokens are while it reads images.

Shapes: B images, T tokens of which the first ``prefix`` are not patches, D features, a grid of H rows and W columns of
patches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models.stem import ConvStem
from ...types import Options
from ..report.maps import evaluate_without_gradients
from ..report.norms import Norms, patch_similarity

BATCH = 32  # images read at a time


class Projected(NamedTuple):
    """Queries, keys and values of a layer's tokens, each (B, T, width), or None where the layer has none."""

    queries: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None


@dataclass
class ProbedModel(ABC):
    """A ViT that can be read, whatever library it is of.

    Args:
        name: as it was given.
        model: in eval mode.
        patch: what embeds patches, a convolution or a stem of several; its kernel is its stride.
        blocks: the layers, in order.
        prefix: names of the tokens before the patches, such as "[CLS]" and "register 1".
        image_size: (height, width) in pixels that the model is given.
        mean, std: of each channel, as the model was trained.
        kind: library and mixers in words.
        notes: what a reader should know, such as that the weights are random.
    """

    name: str
    model: Any
    patch: nn.Conv2d | ConvStem
    blocks: list[nn.Module]
    prefix: tuple[str, ...]
    image_size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    kind: str
    notes: list[str] = field(default_factory=list)

    @property
    def side(self) -> tuple[int, int]:
        """Return height and width of a patch in pixels."""
        return self.patch.kernel_size[0], self.patch.kernel_size[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Return rows and columns of patches."""
        return self.image_size[0] // self.side[0], self.image_size[1] // self.side[1]

    @property
    def channels(self) -> int:
        """Return the channels of the images."""
        return self.patch.in_channels

    @abstractmethod
    def run(self, images: Tensor) -> tuple[Tensor, Projected]:
        """Map images (B, C, H, W) to the tokens (B, T, D) that the model gives, after its last norm, and return
        queries, keys and values of its last layer.
        """

    def at_steps(self) -> Iterator[tuple[int, ProbedModel]]:
        """Load the model at each step of its training that is kept, the first step first; none is by default."""
        yield from ()

    @abstractmethod
    def attention(self, images: Tensor) -> tuple[Tensor, str]:
        """Return what each token reads of each in the last layer, (B, T, T), the mean over heads, and how it is known.

        "softmax" and "values" are exact weights of values, the latter with their size where they have signs;
        "jacobian" is the norm of the derivative.
        """


class Reading(NamedTuple):
    """What a ViT's tokens were while it read images.

    Attributes:
        norms: L2 norms of the tokens before the first block and after each, before the model's last norm.
        similarity: (B, H, W), cosine similarity of each patch with its neighbours right after the patch embedding.
        patches: (B, H W, D), the patches' tokens at the output of the model.
        prefix: (B, prefix, D), the other tokens there.
        pooled: kind of token -> (layers + 1, B, D), where the norms are: the tokens of ``prefix`` except registers, and
            the means of registers and of patches.
        features: queries, keys and values of the last layer's patches in the first images, each (b, H W, width) or
            None.
    """

    norms: Norms
    similarity: Tensor
    patches: Tensor
    prefix: Tensor
    pooled: dict[str, Tensor]
    features: Projected


def read(subject: ProbedModel, images: Tensor, first: int = BATCH) -> Reading:
    """Let a ViT read images (B, C, H, W), normalised as it was trained, a few at a time.

    Queries, keys and values are kept of the ``first`` images.

    Raises:
        MixerError: no images, images that do not have the subject's channels and size, or numbers that are not finite.
    """
    check_images(subject, images)
    n, grid = len(subject.prefix), subject.grid
    parts: list[Any] = []
    with evaluate_without_gradients(subject.model):
        for part in images.split(BATCH):
            with record_passes(subject) as seen:
                output, projected = subject.run(part)
            if output.shape[1] != n + grid[0] * grid[1]:
                raise MixerError(
                    f"look tokens: {subject.name}: gives {output.shape[1]} tokens where {n} and {grid[0]} x {grid[1]} "
                    + "patches were expected; only models that keep every token can be read."
                )
            sizes = torch.stack([x.double().norm(dim=-1) for x in seen.layers])
            left = max(0, first - sum(len(p[3]) for p in parts))
            features = [None if each is None else each[:left, n:] for each in projected]
            alike = patch_similarity(seen.embedded[0])
            pooled = [pool_tokens(x, subject.prefix) for x in seen.layers]
            parts.append((sizes[:, :, n:].unflatten(2, grid), sizes[:, :, :n], alike, output, features, pooled))
    norms = Norms(torch.cat([p[0] for p in parts], 1), torch.cat([p[1] for p in parts], 1))
    if not bool(norms.patches.isfinite().all()):
        raise MixerError(
            f"look tokens: {subject.name}: some tokens are not finite; the model has diverged or is damaged."
        )
    tokens = torch.cat([p[3] for p in parts])
    joined = [None if each[0] is None else torch.cat(each) for each in zip(*(p[4] for p in parts), strict=True)]
    by_layer = {
        kind: torch.stack([torch.cat([p[5][i][kind] for p in parts]) for i in range(len(norms.patches))])
        for kind in parts[0][5][0]
    }
    return Reading(norms, torch.cat([p[2] for p in parts]), tokens[:, n:], tokens[:, :n], by_layer, Projected(*joined))


def pool_tokens(x: Tensor, prefix: Sequence[str]) -> dict[str, Tensor]:
    """Return vectors (B, D) of tokens x (B, T, D): of each that ``prefix`` names, all registers, and all patches."""
    registers = [i for i, name in enumerate(prefix) if name.startswith("register")]
    found = {name: x[:, i] for i, name in enumerate(prefix) if i not in registers}
    if registers:
        found["mean of registers"] = x[:, registers].mean(1)
    return {**found, "mean of all patches": x[:, len(prefix) :].mean(1)}


def check_images(subject: ProbedModel, images: Tensor) -> None:
    """Raise an error unless images are a batch of the subject's channels and size."""
    want = (subject.channels, *subject.image_size)
    if images.ndim != 4 or not len(images):
        raise MixerError(f"look tokens: expects images (B, {', '.join(map(str, want))}), got {tuple(images.shape)}.")
    if tuple(images.shape[1:]) != want:
        raise MixerError(
            f"look tokens: {subject.name} takes images of {want[0]} channels and {want[1]} x {want[2]} pixels, got "
            + f"{images.shape[1]} channels and {images.shape[2]} x {images.shape[3]}; resize them first."
        )


class Seen(NamedTuple):
    """What hooks saw in one pass: the embedded patches, and the tokens before the first block and after each."""

    embedded: list[Tensor]
    layers: list[Tensor]


@contextmanager
def record_passes(subject: ProbedModel) -> Iterator[Seen]:
    """Note embedded patches and residual stream of the passes inside the block."""
    seen = Seen([], [])

    def note_input(_: nn.Module, args: tuple, given: Options) -> None:
        seen.layers.append((args[0] if args else given["hidden_states"]).detach())

    def note_output(_: nn.Module, args: tuple, y: Tensor | tuple[Tensor, ...]) -> None:
        seen.layers.append((y[0] if isinstance(y, tuple) else y).detach())

    hooks = [
        subject.patch.register_forward_hook(lambda _, args, y: seen.embedded.append(y.detach())),
        subject.blocks[0].register_forward_pre_hook(note_input, with_kwargs=True),
        *(block.register_forward_hook(note_output) for block in subject.blocks),
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def prefix_names(classes: Sequence[str], registers: int) -> tuple[str, ...]:
    """Return names of the tokens before the patches: those given, then the registers."""
    return (*classes, *(f"register {i + 1}" for i in range(registers)))
