"""Text as bytes and images as pixels, both memory-mapped, and stateless samplers over them."""

from .augment import Augment as Augment
from .augment import ImageSampler as ImageSampler
from .augment import eval_batches as eval_batches
from .bounds import Bounds as Bounds
from .corpora import CORPORA as CORPORA
from .corpora import open_corpus as open_corpus
from .corpus import SPLITS as SPLITS
from .corpus import Corpus as Corpus
from .images import IMAGE_SETS as IMAGE_SETS
from .images import ImageData as ImageData
from .images import ImageSplit as ImageSplit
from .images import open_images as open_images
from .pixels import PixelSampler as PixelSampler
from .pixels import from_pixels as from_pixels
from .pixels import pixel_batches as pixel_batches
from .pixels import to_pixels as to_pixels
from .recall import recall_batch as recall_batch
from .sampler import Sampler as Sampler
