"""Text as bytes, memory-mapped, and a stateless sampler over it."""

from .corpora import CORPORA as CORPORA
from .corpora import open_corpus as open_corpus
from .corpus import SPLITS as SPLITS
from .corpus import Corpus as Corpus
from .recall import recall_batch as recall_batch
from .sampler import Sampler as Sampler
