"""Text as bytes and images as pixels, both memory-mapped, stateless samplers over them, synthetic sequences, and
point clouds.
"""

from .augment import Augment, ImageSampler, eval_batches
from .augment_masks import MaskAugment, MaskSampler, mask_batches
from .bounds import Bounds
from .characters import CHARACTER_TASKS, CHARACTERS, text_of
from .corpora import CORPORA, open_corpus
from .corpus import SPLITS, Corpus
from .documents import DOCUMENT_SETS, open_documents
from .images import IMAGE_SETS, ImageData, ImageSplit, open_images
from .labelled import LABELLED_SETS, open_labelled
from .long_tail import long_tail_counts, long_tailed
from .masks import MASK_SETS, MaskData, MaskSplit, open_masks
from .pixels import PixelSampler, from_pixels, pixel_batches, to_pixels
from .points import POINT_SETS, Jitter, PointSampler, PointSet, open_points
from .recall import recall_batch
from .rows import Rows
from .sampler import Sampler
from .scenes import SCENE_CLASSES, scene, scene_of_shapes
from .subwords import Subwords
from .synthetic import SYNTHETIC_TASKS, Synthetic
from .translations import PARALLEL_SETS, ParallelText, open_parallel

__all__ = [
    "Augment",
    "Bounds",
    "CHARACTERS",
    "CHARACTER_TASKS",
    "CORPORA",
    "Corpus",
    "DOCUMENT_SETS",
    "IMAGE_SETS",
    "ImageData",
    "ImageSampler",
    "ImageSplit",
    "Jitter",
    "LABELLED_SETS",
    "MASK_SETS",
    "MaskAugment",
    "MaskData",
    "MaskSampler",
    "MaskSplit",
    "PARALLEL_SETS",
    "POINT_SETS",
    "ParallelText",
    "PixelSampler",
    "PointSampler",
    "PointSet",
    "Rows",
    "SCENE_CLASSES",
    "SPLITS",
    "SYNTHETIC_TASKS",
    "Sampler",
    "Subwords",
    "Synthetic",
    "eval_batches",
    "from_pixels",
    "long_tail_counts",
    "long_tailed",
    "mask_batches",
    "open_corpus",
    "open_documents",
    "open_images",
    "open_labelled",
    "open_masks",
    "open_parallel",
    "open_points",
    "pixel_batches",
    "recall_batch",
    "scene",
    "scene_of_shapes",
    "text_of",
    "to_pixels",
]
