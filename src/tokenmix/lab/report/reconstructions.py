"""Pictures of what a masked autoencoder makes of patches that it does not see."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models import MAE
from ...models.mae import hidden_patches, images_of, kept_count, pixel_targets
from ..data.masking import draws_of, kept_patches
from .figures import Picture
from .image_grid import as_shown, image_grid
from .maps import evaluate_without_gradients

IMAGES, PIXELS = 8, 112
"""Most images in a picture, and the least pixels of a side: smaller images are enlarged by whole factors."""


def reconstruction_pictures(model: MAE, images: Tensor, names: Sequence[str]) -> list[Picture]:
    """Draw images as the model sees them, as it completes them, and as they are, with the error of each patch.

    Which patches of an image are hidden depends on its place among the images only, as in evaluations.
    """
    images, patch = images[:IMAGES], model.config.patch
    rows, columns = (-(-n // patch) for n in images.shape[2:])
    n = rows * columns
    keep = kept_patches(draws_of(range(len(images)), n), kept_count(n, model.config.mask_ratio))
    hidden = hidden_patches(keep, n)
    keep, hidden = keep.to(images.device), hidden.to(images.device)
    with evaluate_without_gradients(model):
        targets = pixel_targets(images, hidden, patch, normalise=model.config.normalise)
        errors = (model(images, keep) - targets).square().mean(-1)
        whole = model.reconstruct(images, keep)
    seen = torch.zeros(len(images), n, 1).scatter(1, keep[..., None].cpu(), 1).expand(-1, -1, model.config.values)
    visible = images_of(seen, patch, (images.shape[2], images.shape[3])).bool()
    maps = torch.full((len(images), n), torch.nan).scatter(1, hidden.cpu(), errors.cpu()).unflatten(1, (rows, columns))
    cells: list[list[Tensor | None]] = []
    for image, made, shown, error in zip(images.cpu(), whole.cpu(), visible, maps, strict=True):
        low, high = image.min(), image.max()
        masked = torch.where(shown, image, (low + high) / 2)
        cells.append([*(enlarge_image(as_shown(each, low, high)) for each in (masked, made, image)), error])
    said = f"{n - keep.shape[1]} of {n} patches hidden; mean squared error {float(errors.mean()):.3f}"
    alt = f"A row per image: what the encoder sees, the reconstruction, the image, and the error of each patch. {said}."
    caption = f"{said}. Seen patches of the reconstruction are those of the image"
    if model.config.normalise:
        caption += (
            "; predicted ones are scaled by the true mean and deviation of the patch, which the model is not told"
        )
    labels = ["masked", "reconstruction", "original", "error"]
    rows_named = list(names[: len(images)])
    bar, caption = "squared error", f"{caption}."
    return [image_grid(cells, rows=rows_named, columns=labels, bar=bar, alt=alt, caption=caption, about_zero=False)]


def enlarge_image(image: Tensor) -> Tensor:
    """Enlarge an image (C, H, W) by a whole factor, each pixel a square, to sides of at least ``PIXELS``."""
    times = -(-PIXELS // min(image.shape[1:]))
    return image.repeat_interleave(times, 1).repeat_interleave(times, 2)
