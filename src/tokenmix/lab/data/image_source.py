"""The common result of all readers of images, and the decoding of one image file with Pillow."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ...errors import MixerError
from .bounds import MAX_PIXELS, check_regular
from .inventory import Inventory

if TYPE_CHECKING:
    from PIL.Image import Image


T = TypeVar("T")
U = TypeVar("U")
LOOKAHEAD = 128  # decoded images that may wait for their turn
NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}  # Pillow knows their headers, or runs a program for them


@dataclass(frozen=True)
class ImagePart:
    """The images of one part of a set as found on disk.

    Args:
        load: function that returns image i as uint8 (C, H, W) with the requested number of channels, and raises a
            MixerError that names the file.
        names: names of the images, for messages and for drawing a split by name.
        files: paths of the images, if each is a file of its own.
    """

    labels: list[int]
    names: list[str]
    load: Callable[[int, int], Tensor]
    files: list[Path] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A whole set as found on disk; its parts are "all", or "train" with "valid", "test" or both.

    Args:
        inventory: what was found so far, and what was left out; None: nothing is known.
    """

    classes: tuple[str, ...]
    channels: int
    parts: dict[str, ImagePart]
    inventory: Inventory | None = None


def array_part(images: Tensor, labels: list[int]) -> ImagePart:
    """Make a part of images in memory, uint8 (N, C, H, W), named by their numbers."""
    return ImagePart(labels, [str(i) for i in range(len(labels))], lambda i, channels: to_channels(images[i], channels))


def check_labels(labels: list[int], classes: int, name: str) -> None:
    """Refuse labels that are not the number of a class."""
    wrong = [(i, y) for i, y in enumerate(labels) if not 0 <= y < classes]
    if wrong:
        raise MixerError(
            f"images: {name}: label {wrong[0][1]} of image {wrong[0][0]} is out of range; "
            + f"{classes} classes have labels 0 to {classes - 1}."
        )


def to_channels(images: Tensor, channels: int) -> Tensor:
    """Convert uint8 (..., C, H, W) to 1 or 3 channels.

    Grey is repeated; colours become their luma (ITU-R 601, rounded as Pillow rounds).
    """
    have = images.shape[-3]
    if have == channels:
        return images
    if (have, channels) == (1, 3):
        return images.expand(*images.shape[:-3], 3, -1, -1)
    if (have, channels) == (3, 1):
        r, g, b = images.int().unbind(-3)
        return ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).to(torch.uint8).unsqueeze(-3)
    raise MixerError(
        f"images: cannot convert {have} channels to {channels}; images have 1 (grey) or 3 (red, green, blue) channels."
    )


def pillow() -> ModuleType:
    """Import the module PIL.Image."""
    try:
        from PIL import Image
    except ImportError as why:
        raise MixerError("images: reading image files needs Pillow; pip install 'tokenmix[vision]'.") from why
    return Image


@lru_cache(1)
def image_endings() -> frozenset[str]:
    """Return the endings of all formats that the installed Pillow decodes, in lower case with their dots."""
    module = pillow()
    module.init()
    return frozenset(
        ending
        for ending, form in module.registered_extensions().items()
        if form in module.OPEN and form not in NOT_DECODED
    )


def is_image(file: Path | IO[bytes]) -> bool:
    """Return whether a file begins as an image of any format that is decoded, whatever its name."""
    module = pillow()
    if isinstance(file, Path) and not file.is_file():
        return False
    try:
        with warnings.catch_warnings(action="ignore"), module.open(file) as image:
            return image.format not in NOT_DECODED
    except module.DecompressionBombError:
        return True
    except Exception:  # whatever a decoder makes of a file that is none of its own
        return False


def read_image(
    file: Path | IO[bytes], channels: int, name: str | None = None, *, max_pixels: int = MAX_PIXELS
) -> Image:
    """Read an image file as an upright PIL image of mode "L" (1 channel) or "RGB" (3).

    The EXIF orientation is applied, transparent pixels are drawn over white, 16-bit grey is scaled to 8 bits, CMYK and
    palettes become colours. Of an animation, the first frame is read.

    Raises:
        MixerError: in one line that names the file, if it is not an image, is damaged, has more than ``max_pixels``, or
            has floating-point pixels.
    """
    mode = "L" if channels == 1 else "RGB"
    return opened_image(
        file,
        name or str(file),
        max_pixels,
        lambda module, image: _to_plain_mode(module, turn_upright(image), mode, name or str(file)),
    )


def turn_upright(image: Image) -> Image:
    """Return a PIL image turned as its EXIF orientation says."""
    from PIL import ImageOps

    return ImageOps.exif_transpose(image)


def opened_image(
    file: Path | IO[bytes], name: str, max_pixels: int, use: Callable[[ModuleType, Image], T], *, load: bool = True
) -> T:
    """Open an image file with Pillow and return ``use(PIL.Image, image)``.

    Args:
        load: decode the pixels first; without, only the header is read.

    Raises:
        MixerError: in one line that names the file, if it is not an image, is damaged, or has more than ``max_pixels``.
    """
    image_module = pillow()
    if isinstance(file, Path):
        check_regular("images", file)
    try:
        with image_module.open(file) as image:
            if image.width * image.height > max_pixels:
                raise _too_many(name, f"{image.width} x {image.height}", max_pixels)
            if load:
                image.load()
            return use(image_module, image)
    except image_module.UnidentifiedImageError as why:
        raise MixerError(f"images: {name} is not an image.") from why
    except (FileNotFoundError, PermissionError, IsADirectoryError) as why:
        raise MixerError(f"images: {name} cannot be opened ({why.strerror}).") from why
    except MixerError:
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as why:
        raise _too_many(name, "too many", max_pixels) from why
    except Exception as why:  # Pillow's decoders raise OSError, SyntaxError, struct.error, ValueError and others
        raise MixerError(f"images: {name} is damaged or truncated ({' '.join(str(why).split())}).") from why


def _too_many(name: str, size: str, most: int) -> MixerError:
    return MixerError(
        f"images: {name} has {size} pixels, but only {most} are allowed; "
        + "if you trust it, raise max_pixels (--data.max_pixels)."
    )


def _to_plain_mode(image_module: ModuleType, image: Image, mode: str, name: str) -> Image:
    if image.mode == "F":
        raise MixerError(
            f"images: {name} has floating-point pixels, whose range is unknown; save it with 8 or 16 bits."
        )
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bit(image_module, image, name).convert(mode)
    if "A" in image.getbands() or "a" in image.getbands() or "transparency" in image.info:
        coloured = image.convert("RGBA")
        return image_module.alpha_composite(image_module.new("RGBA", coloured.size, "white"), coloured).convert(mode)
    return image.convert(mode)


def _from_16_bit(image_module: ModuleType, image: Image, name: str) -> Image:
    """Scale 16-bit values to 8 bits; Pillow's own conversion clips at 255."""
    import numpy

    wide = numpy.asarray(image).astype(numpy.int64)
    if wide.min() < 0 or wide.max() > 65535:
        raise MixerError(f"images: {name} has values from {wide.min()} to {wide.max()}; save it with 8 or 16 bits.")
    return image_module.fromarray(((wide + 128) // 257).astype(numpy.uint8))


def pil_to_tensor(image: Image) -> Tensor:
    """Convert a PIL image of mode "L" or "RGB" to uint8 (C, H, W)."""
    channels = len(image.getbands())
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, channels).permute(2, 0, 1).contiguous()


def tensor_to_pil(image: Tensor) -> Image:
    """Convert uint8 (C, H, W) to a PIL image of mode "L" or "RGB"."""
    channels, height, width = image.shape
    plain = bytes(image.permute(1, 2, 0).contiguous().numpy())
    return pillow().frombytes("L" if channels == 1 else "RGB", (width, height), plain)


def in_threads(function: Callable[[T], U], items: Iterable[T], ahead: int = LOOKAHEAD) -> Iterator[U]:
    """Map a function over items in a few threads, in order and with a bounded lookahead.

    Decoding releases the interpreter's lock.
    """
    waiting: deque[Future[U]] = deque()
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
