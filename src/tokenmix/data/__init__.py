"""Text as bytes, memory-mapped, and a stateless sampler over it."""

from .corpora import CORPORA as CORPORA
from .corpora import open_corpus as open_corpus
from .corpus import SPLITS as SPLITS
from .corpus import Corpus as Corpus
from .sampler import Sampler as Sampler
