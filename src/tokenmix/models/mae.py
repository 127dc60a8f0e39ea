"""Masked autoencoders (MAE, He et al. 2022, arXiv 2111.06377): a ViT learns from images without labels.

The encoder sees a part of the patches, with their positions; a small decoder predicts the pixels of the others. Shapes:
B images, N patches of P = channels * patch^2 pixels each, K of them kept, M = N - K hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..positions.grid import sincos
from ..types import Options, Spec
from .blocks import Block, cycle_specs
from .images import pad_to_patches
from .layers import build_norm, init_linear
from .model import Model
from .vit import ViT, ViTConfig

EPS = 1e-6
"""Added to the variance of a patch before it divides, as in the authors' code."""


@dataclass(frozen=True)
class MAEConfig(ViTConfig):
    """A masked autoencoder as JSON. The fields not listed here are those of ``ViTConfig`` and describe the encoder.

    Args:
        classes: 0; nothing is classified.
        decoder_dim: features per token of the decoder, a multiple of 4.
        decoder_layers: number of its blocks, at least 1.
        decoder_mixers: one spec per layer of the decoder, or a shorter list repeated cyclically.
        mask_ratio: share of the patches that are hidden, in (0, 1); at least one is kept and one hidden.
        normalise: predict each patch less its mean, divided by its standard deviation, and not the pixels themselves.
    """

    classes: int = 0
    decoder_dim: int = 512
    decoder_layers: int = 8
    decoder_mixers: tuple[Spec, ...] = ({"name": "attention", "heads": 16},)
    mask_ratio: float = 0.75
    normalise: bool = True
    kind: ClassVar[str] = "mae"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "decoder_mixers", tuple(self.decoder_mixers))
        if self.stem != "patch":
            raise MixerError("MAEConfig: stem must be 'patch'; a convolutional stem would read the hidden patches.")
        if self.classes:
            raise MixerError(f"MAEConfig: classes must be 0, got {self.classes}; a ViT that starts from this has them.")
        if self.decoder_dim < 4 or self.decoder_dim % 4:
            raise MixerError(f"MAEConfig: decoder_dim must be a positive multiple of 4, got {self.decoder_dim}.")
        if not 0 < len(self.decoder_mixers) <= self.decoder_layers:
            raise MixerError(
                f"MAEConfig: decoder_mixers must hold 1 to decoder_layers={self.decoder_layers} specs, got "
                + f"{len(self.decoder_mixers)}."
            )
        if self.normalise and self.values < 2:
            raise MixerError("MAEConfig: normalise=true needs patches of at least 2 values; got patch=1, channels=1.")
        patches = self.grid[0] * self.grid[1]
        if not (0 < self.mask_ratio < 1 and 0 < kept_count(patches, self.mask_ratio) < patches):
            raise MixerError(
                f"MAEConfig: mask_ratio must be in (0, 1) and keep 1 to {patches - 1} of the {patches} patches, got "
                + f"{self.mask_ratio}."
            )

    @property
    def values(self) -> int:
        """Return the number of values of a patch, P."""
        return self.channels * self.patch**2

    @property
    def encoder(self) -> ViTConfig:
        """Return the config of the encoder alone, a ViT without a head."""
        return ViTConfig(**{f.name: getattr(self, f.name) for f in fields(ViTConfig)})


def masked_autoencoder(vit: ViTConfig, **options: Any) -> MAEConfig:
    """Return the config that trains this ViT, without its head, as a masked autoencoder.

    Args:
        options: fields of ``MAEConfig`` that differ from their defaults.
    """
    own = {f.name: getattr(vit, f.name) for f in fields(ViTConfig) if f.name != "classes"}
    return MAEConfig(**own, **options)


def kept_count(patches: int, mask_ratio: float) -> int:
    """Return how many of the patches are kept: (1 - mask_ratio) of them, rounded down, as in the authors' code."""
    return int(patches * (1 - mask_ratio) + 1e-9)  # 10 (1 - 0.9) is less than 1 in floating point


class MAE(Model):
    """An encoder of the patches that are kept, and a decoder of all.

    Args:
        config: a ``MAEConfig``.
    """

    config_class = MAEConfig
    pipeline_tags = None, "image-feature-extraction"

    def __init__(self, config: MAEConfig):
        super().__init__()
        self.config = config
        self.encoder = ViT(config.encoder)
        self.decoder = Decoder(config)

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator."""
        self.encoder.reset_parameters()
        self.decoder.reset_parameters()

    def forward(self, images: Tensor, keep: Tensor) -> Tensor:
        """Predict the hidden patches, (B, M, P), in ascending order of their positions.

        Args:
            images: (B, C, H, W), normalised. Of the hidden patches nothing is read.
            keep: (B, K) integers, the patches of each image that are kept, in ascending order; see ``hidden_patches``.
        """
        tokens = self.encoder.forward_features(images, keep=keep)
        rows, columns = (-(-n // self.config.patch) for n in images.shape[2:])
        return self.decoder(tokens, keep, hidden_patches(keep, rows * columns), (rows, columns))

    @torch.no_grad()
    def reconstruct(self, images: Tensor, keep: Tensor) -> Tensor:
        """Return the images, (B, C, H, W), with the hidden patches replaced by the predictions.

        What it predicts of normalised patches is scaled back by the true mean and deviation of each, which the model
        does not know: the picture shows the structure that it predicts, not the brightness.
        """
        said, patches = self(images, keep), patches_of(images, self.config.patch)
        hidden = hidden_patches(keep, patches.shape[1])
        if self.config.normalise:
            mean, deviation = moments_of(take_tokens(patches, hidden))
            said = said * deviation + mean
        patches = patches.scatter(1, hidden[..., None].expand_as(said), said.to(patches.dtype))
        return images_of(patches, self.config.patch, (images.shape[2], images.shape[3]))


class Decoder(nn.Module):
    """A linear map to its width, mask tokens in place of hidden patches, positions, blocks, norm, a map to pixels.

    Its positions are fixed sinusoids, added to the patches; the tokens before these (class token, registers) have none.
    """

    def __init__(self, config: MAEConfig):
        super().__init__()
        self.config = config
        dim, tokens = config.decoder_dim, config.prefix + config.grid[0] * config.grid[1]
        options: Options = {
            "mlp_ratio": config.mlp_ratio,
            "mlp": config.mlp,
            "norm_type": config.norm_type,
            "norm_eps": config.norm_eps,
            "dropout": config.dropout,
        }
        with torch.random.fork_rng():  # as in ViT: only reset_parameters below may draw
            self.embed = nn.Linear(config.dim, dim)
            self.mask_token = nn.Parameter(torch.empty(dim))
            self.blocks: Any = nn.ModuleList(
                Block(dim, spec, causal=False, max_len=tokens, grid=config.grid, **options)
                for spec in cycle_specs(config.decoder_mixers, config.decoder_layers)
            )
            self.norm = build_norm(config.norm_type, dim, config.norm_eps)
            self.head = nn.Linear(dim, config.values)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator, as ``ViT`` does."""
        std = self.config.init_std
        for linear in (self.embed, self.head):
            init_linear(linear, std)
        nn.init.normal_(self.mask_token, std=std)
        for block in self.blocks:
            block.reset_parameters(std)
        self.norm.reset_parameters()

    def forward(self, tokens: Tensor, keep: Tensor, hidden: Tensor, grid: tuple[int, int]) -> Tensor:
        """Map the encoder's tokens (B, prefix + K, D) to the pixels (B, M, P) of the patches in ``hidden``."""
        prefix = self.config.prefix
        x = self.embed(tokens)
        seen = x[:, prefix:]
        full = self.mask_token.to(x.dtype).expand(x.shape[0], grid[0] * grid[1], -1)
        full = full.scatter(1, keep[..., None].expand_as(seen), seen)
        full = full + sincos(grid, self.config.decoder_dim, device=x.device).to(x.dtype)
        x = torch.cat([x[:, :prefix], full], 1)
        for block in self.blocks:
            x = block(x, grid=grid, prefix=prefix)
        return self.head(self.norm(take_tokens(x, prefix + hidden)))


def hidden_patches(keep: Tensor, patches: int) -> Tensor:
    """Return the patches (B, M) that are not in ``keep`` (B, K), in ascending order.

    Raises:
        MixerError: for patches that are not in 0..patches - 1, not in ascending order or given twice, and if none or
            all are kept.
    """
    if keep.ndim != 2 or not 0 < keep.shape[1] < patches:
        raise MixerError(
            f"MAE: keep must be (batch, 1 to {patches - 1} of {patches} patches), got {tuple(keep.shape)}."
        )
    if not torch.compiler.is_compiling():
        least, most = int(keep.min()), int(keep.max())
        if not 0 <= least <= most < patches:
            raise MixerError(f"MAE: keep must be patches in 0..{patches - 1}, got {least} to {most}.")
        if bool((keep.diff(dim=1) <= 0).any()):
            raise MixerError("MAE: keep must name the patches of each image in ascending order, each once; sort it.")
    kept = torch.zeros(keep.shape[0], patches, dtype=torch.uint8, device=keep.device).scatter(1, keep, 1)
    return kept.argsort(dim=1, stable=True)[:, : patches - keep.shape[1]]


def patches_of(images: Tensor, patch: int) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, N, P), row by row, padded with zeros as a ViT pads them."""
    x = pad_to_patches(images, patch).unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # B C rows p columns p
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


def images_of(patches: Tensor, patch: int, size: tuple[int, int]) -> Tensor:
    """Put patches (B, N, P) together to images (B, C, *size): the inverse of ``patches_of``."""
    rows, columns = (-(-n // patch) for n in size)
    x = patches.unflatten(2, (-1, patch, patch)).unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5)
    return x.flatten(4).flatten(2, 3)[:, :, : size[0], : size[1]]


def take_tokens(tokens: Tensor, index: Tensor) -> Tensor:
    """Return the tokens (B, M, D) of (B, N, D) at the indices (B, M)."""
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[2]))


def moments_of(patches: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation of each patch, (B, M, 1): sqrt(unbiased variance + 1e-6)."""
    return patches.mean(-1, keepdim=True), (patches.var(-1, keepdim=True) + EPS).sqrt()


def pixel_targets(images: Tensor, hidden: Tensor, patch: int, *, normalise: bool = True) -> Tensor:
    """Return the targets of a masked autoencoder, (B, M, P): the pixels x of each patch in ``hidden`` (B, M).

    With ``normalise``, (x - mean(x)) / sqrt(var(x) + 1e-6), with the unbiased variance over the patch's P values.
    """
    patches = take_tokens(patches_of(images, patch), hidden)
    if not normalise:
        return patches
    mean, deviation = moments_of(patches)
    return (patches - mean) / deviation


def pixel_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean over hidden patches and their pixels of (predictions - targets)^2, both (B, M, P).

    It is at least in float32.
    """
    predictions = predictions if predictions.dtype == torch.float64 else predictions.float()
    return F.mse_loss(predictions, targets.to(predictions.dtype))
