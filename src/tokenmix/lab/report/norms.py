"""Token norms layer by layer, as in "Vision Transformers Need Registers" (Darcet et al. 2024, arXiv 2309.16588)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.images import pad_to_patches
from .maps import check_vit, evaluate_without_gradients


class Norms(NamedTuple):
    """L2 norms of tokens: ``patches`` (layers + 1, B, H, W), ``prefix`` (layers + 1, B, prefix); 0 is before the first
    block.

    The prefix holds the class token and registers.
    """

    patches: Tensor
    prefix: Tensor


def token_norms(model: nn.Module, images: Tensor) -> Norms:
    """Compute the norms of the tokens before the first block and after each, before the model's last norm.

    Darcet et al. 2024, arXiv 2309.16588.
    """
    model = check_vit(model, "token_norms")
    prefix, found = model.config.prefix, []
    with evaluate_without_gradients(model):
        x, given = model.embed(images)
        found.append(x.double().norm(dim=-1))
        for block in model.blocks:
            x = block(x, **given)
            found.append(x.double().norm(dim=-1))
    norms = torch.stack(found)
    return Norms(norms[:, :, prefix:].unflatten(2, given["grid"]), norms[:, :, :prefix])


def outlier_cutoff(norms: Tensor) -> float:
    """Compute the third quartile plus three times the range between the quartiles (Tukey's far fence).

    The paper chooses 150 for DINOv2 by hand; models differ.
    """
    low, high = (
        norms.double().flatten().quantile(torch.tensor([0.25, 0.75], dtype=torch.float64, device=norms.device)).tolist()
    )
    return high + 3 * (high - low)


def share_above(norms: Tensor, cutoff: float) -> Tensor:
    """Compute the share of patches (layers + 1,) whose norm, (layers + 1, B, H, W), is above a cutoff."""
    return (norms > cutoff).double().flatten(1).mean(1)


def neighbour_similarity(model: nn.Module, images: Tensor) -> Tensor:
    """Compute ``patch_similarity`` of a ViT's patches right after its patch embedding, (B, H, W).

    Positions are not added yet.
    """
    model = check_vit(model, "neighbour_similarity")
    with evaluate_without_gradients(model):
        return patch_similarity(model.patch(pad_to_patches(images, model.config.patch)))


def patch_similarity(patches: Tensor) -> Tensor:
    """Compute the mean cosine similarity (B, H, W) of each patch of (B, D, H, W) with its four neighbours.

    Patches at a border have three neighbours, in a corner two; a grid of one patch has none and gives NaN.
    """
    patches = patches.double()
    unit = patches / patches.norm(dim=1, keepdim=True).clamp_min(1e-30)
    down, right = (unit[:, :, 1:] * unit[:, :, :-1]).sum(1), (unit[..., 1:] * unit[..., :-1]).sum(1)
    return _both_ends(down, right) / _both_ends(torch.ones_like(down), torch.ones_like(right))


def _both_ends(down: Tensor, right: Tensor) -> Tensor:
    """Add values between patches, (B, H - 1, W) and (B, H, W - 1), to the patches on both sides, (B, H, W)."""
    return F.pad(down, (0, 0, 1, 0)) + F.pad(down, (0, 0, 0, 1)) + F.pad(right, (1, 0)) + F.pad(right, (0, 1))
