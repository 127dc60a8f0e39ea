"""Text as bytes and images as pixels, both memory-mapped, stateless samplers over them, and synthetic sequences."""

from .augment import Augment, ImageSampler, eval_batches
from .bounds import Bounds
from .characters import CHARACTER_TASKS, CHARACTERS, text_of
from .corpora import CORPORA, open_corpus
from .corpus import SPLITS, Corpus
from .images import IMAGE_SETS, ImageData, ImageSplit, open_images
from .pixels import PixelSampler, from_pixels, pixel_batches, to_pixels
from .recall import recall_batch
from .sampler import Sampler
from .synthetic import SYNTHETIC_TASKS, Synthetic

__all__ = [
    "Augment",
    "Bounds",
    "CHARACTERS",
    "CHARACTER_TASKS",
    "CORPORA",
    "Corpus",
    "IMAGE_SETS",
    "ImageData",
    "ImageSampler",
    "ImageSplit",
    "PixelSampler",
    "SPLITS",
    "SYNTHETIC_TASKS",
    "Sampler",
    "Synthetic",
    "eval_batches",
    "from_pixels",
    "open_corpus",
    "open_images",
    "pixel_batches",
    "recall_batch",
    "text_of",
    "to_pixels",
]
