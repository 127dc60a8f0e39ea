"""All pictures of what a vision model looks at: as sections of a page, or as files from any image file."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...models import MAE
from ...system.files import whole_file
from ..data import eval_batches, open_images
from ..data.bounds import MAX_PIXELS, Bounds
from ..data.image_source import pil_to_tensor, pillow, read_image
from . import image_pictures as draw
from .figures import Picture, check_drawing
from .maps import check_vit
from .reconstructions import reconstruction_pictures
from .runs import Run, load_model

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Section = tuple[str, list[Picture]]


def vision_section(
    run_or_model: Run | nn.Module,
    images: Tensor,
    names: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda heading: None,
) -> list[Section]:
    """Draw everything about a ViT reading these images, as (heading, pictures); headings without a picture are left
    out.

    Of a masked autoencoder, its reconstructions come first; the rest is about its encoder, which then sees all patches.

    Args:
        run_or_model: a model, or a run whose newest checkpoint is read.
        images: (B, C, H, W), normalised as the model was trained.
        names: of the images; default: "image 0", "image 1" ...
        tell: called with each heading before its pictures are drawn.
    """
    model = load_model(run_or_model) if isinstance(run_or_model, Run) else run_or_model
    if model is None:
        raise MixerError(f"vision_section: the run {run_or_model.path} has no checkpoint yet.")  # type: ignore[union-attr]  # a run, or there were a model
    whole, model = model, check_vit(model, "vision_section")
    names = [f"image {b}" for b in range(len(images))] if names is None else list(names)
    if not len(images) or len(names) != len(images):
        raise MixerError(
            f"vision_section: expects images and a name for each, got {len(images)} images and {len(names)} names."
        )
    parts: list[tuple[str, Callable[[], list[Picture]]]] = [
        *(
            [("Reconstructions", lambda: reconstruction_pictures(whole, images, names))]
            if isinstance(whole, MAE)
            else []
        ),
        ("Filters of AFT-conv", lambda: draw.filter_pictures(model)),
        ("Sparsity of the filters", lambda: draw.sparsity_pictures(model)),
        ("Position biases of AFT", lambda: draw.pair_bias_pictures(model)),
        ("Keys", lambda: draw.key_pictures(model, images, names)),
        ("Attention by offset", lambda: draw.relative_attention_pictures(model, images)),
        ("Focus", lambda: draw.focus_pictures(model, images, names)),
        ("External memories", lambda: draw.memory_pictures(model, images, names)),
        ("Token norms", lambda: draw.norm_pictures(model, images, names)),
    ]
    drawn = []
    for heading, pictures in parts:
        tell(heading)
        drawn.append((heading, pictures()))
    return [(heading, pictures) for heading, pictures in drawn if pictures]


def draw_pictures(
    model: nn.Module,
    image_files: Sequence[Path | str],
    out_dir: Path | str,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    theme: str = "light",
) -> list[Path]:
    """Write everything that ``vision_section`` draws as PNG files.

    Args:
        image_files: any images; each is resized and cropped to the model's image size.
        mean, std: per channel, as the model was trained; default: ImageNet's for three channels, else 0.5 and 0.5.
        theme: "light" or "dark".

    Returns:
        The paths written.
    """
    if theme not in ("light", "dark"):
        raise MixerError(f"draw_pictures: theme={theme!r}; choose 'light' or 'dark'.")
    config = check_vit(model, "draw_pictures").config
    check_drawing("draw_pictures")
    centre, scale = (
        torch.tensor(_per_channel(given, own, config.channels)).view(-1, 1, 1)
        for given, own in zip((mean, std), IMAGENET, strict=True)
    )
    images = (
        torch.stack([(load_image(f, config.image_size, config.channels) - centre) / scale for f in image_files])
        if image_files
        else torch.empty(0)
    )
    sections = vision_section(model, images, [Path(f).name for f in image_files])
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for heading, pictures in sections:
        for i, picture in enumerate(pictures):
            slug = re.sub(r"[^a-z0-9]+", "-", heading.lower())
            written.append(out / f"{slug}{f'-{i + 1}' if len(pictures) > 1 else ''}.png")
            with whole_file(written[-1]) as f:
                f.write(base64.b64decode(getattr(picture, theme).partition(",")[2]))
    return written


def load_image(path: Path | str, size: tuple[int, ...], channels: int = 3) -> Tensor:
    """Load an image file as (channels, height, width) in 0..1, resized to cover ``size``, (height, width), and
    centre-cropped.

    Raises:
        MixerError: the file is missing, truncated or not an image; one line names it.
    """
    if channels not in (1, 3):
        raise MixerError(f"load_image: an image file has 3 channels, or 1 in grey; the model takes {channels}.")
    image = read_image(Path(path), channels)
    from PIL import ImageOps

    return pil_to_tensor(ImageOps.fit(image, (size[1], size[0]), pillow().Resampling.BICUBIC)).float() / 255


def run_images(run: Run, model: nn.Module, n: int) -> tuple[Tensor, list[str]]:
    """Return at most n images of a run's validation split as its model receives them, and names for them.

    They are of as many classes as there can be: the first image of each class, then the second of each.
    """
    data, config = run.config["data"], check_vit(model, "run_images").config
    images = open_images(
        data["source"],
        path=data.get("path"),
        valid=data.get("valid"),
        skip_bad_files=data.get("skip_bad_files", False),
        channels=config.channels,
        layout=data.get("layout"),
        bounds=Bounds(data.get("max_unpacked"), data.get("max_pixels", MAX_PIXELS)),
    )
    options = {
        "image_size": config.image_size,
        "channels": config.channels,
        "mean": data.get("mean"),
        "std": data.get("std"),
    }
    split = images.split("valid")
    chosen = of_all_classes(split.labels.tolist(), n)
    shown, labels = next(iter(eval_batches(split.select(chosen), batch_size=n, limit=n, **options)))
    return shown, [f"{i}: {images.classes[int(label)]}" for i, label in zip(chosen, labels, strict=True)]


def of_all_classes(labels: Sequence[int], n: int) -> list[int]:
    """Return the places of one example of each class, of at most n classes spread over all, and of three at least."""
    seen: dict[int, int] = {}
    ranked = []
    for place, label in enumerate(labels):
        seen[label] = seen.get(label, -1) + 1
        ranked.append((seen[label], label, place))
    first = [place for rank, _, place in sorted(ranked) if rank == 0]
    if len(first) > n:
        return [first[i * len(first) // n] for i in range(n)]
    return [place for _, _, place in sorted(ranked)][: max(len(first), min(3, n))]


def _per_channel(given: Sequence[float] | None, imagenet: tuple[float, ...], channels: int) -> list[float]:
    """Return means or deviations, one per channel."""
    if given is None:
        return list(imagenet) if channels == 3 else [0.5] * channels
    if len(given) != channels:
        raise MixerError(
            f"draw_pictures: mean and std have one number for each of {channels} channels, got {list(given)}."
        )
    return [float(n) for n in given]
