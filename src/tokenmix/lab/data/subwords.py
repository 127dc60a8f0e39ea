"""Subwords: byte-level BPE trained on a corpus, or a ready ``tokenizer.json``, through the library ``tokenizers``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import cache, cached_property
from itertools import count, groupby, takewhile
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from ...errors import MixerError
from .bounds import check_regular
from .progress import with_progress

PAD, START, END, MASK = range(4)
SPECIAL = ("<pad>", "<s>", "</s>", "<mask>")
"""The tokens 0 to 3 of every tokenizer that is trained here."""
SPACE = "Ġ"
"""What a space is written as by byte-level BPE; a token that begins with it begins a word."""
SENTINEL = "<extra_{}>"
"""Tokens that stand for the spans that a model has to fill in."""
BYTES = 256
TOGETHER = 10_000  # texts that are encoded at once: the library holds some kilobytes for each


class Subwords:
    """A text as integers, and back.

    Args:
        json: the content of a ``tokenizer.json``.
        where: named in errors.
    """

    mask = MASK
    """The token that stands for a hidden one."""

    def __init__(self, json: str, where: str = "tokenizer.json"):
        self.json = json
        tokenizers = _library()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json)
        except Exception as why:  # the library raises Exception itself
            raise MixerError(f"{where} is not a tokenizer ({' '.join(str(why).split())[:200]}).") from None
        self._tokenizer.encode_special_tokens = True  # a text that holds "</s>" holds these four characters
        ids = [self._tokenizer.token_to_id(token) for token in SPECIAL]
        if ids != list(range(len(SPECIAL))):
            raise MixerError(
                f"{where}: the tokens 0 to 3 must be {', '.join(SPECIAL)}, but they have the numbers {ids}; "
                + "leave data.tokenizer out to train one on the corpus."
            )

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int, *, sentinels: int = 0) -> Subwords:
        """Train byte-level BPE (Sennrich et al. 2016, arXiv 1508.07909) on texts; any text can be encoded then.

        Args:
            texts: lines or documents.
            vocab: most tokens in the vocabulary, at least 260 and ``sentinels``; a small corpus gives fewer.
            sentinels: number of tokens after the special ones that stand for spans; see ``corrupt_spans``.

        Raises:
            MixerError: for a vocabulary that has no room for 256 bytes, the 4 special tokens and the sentinels.
        """
        special = [*SPECIAL, *(SENTINEL.format(i) for i in range(sentinels))]
        if vocab < BYTES + len(special):
            raise MixerError(
                f"Subwords: {BYTES} bytes and {len(special)} special tokens need model.vocab >= "
                + f"{BYTES + len(special)}, got {vocab}."
            )
        tokenizers = _library()
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
        made = tokenizers.Tokenizer(tokenizers.models.BPE())
        made.pre_tokenizer, made.decoder = byte_level, tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab,
            special_tokens=special,
            initial_alphabet=byte_level.alphabet(),
            show_progress=False,
        )
        known = list(texts)
        counted = with_progress(known, len(known), "counting the words of texts for a tokenizer")
        made.train_from_iterator(counted, trainer)
        return cls(made.to_str())

    @classmethod
    def load(cls, path: Path | str) -> Subwords:
        """Read a ``tokenizer.json``.

        Raises:
            MixerError: if there is none, or if its tokens 0 to 3 are not ``SPECIAL``.
        """
        check_regular("data", Path(path))
        try:
            return cls(Path(path).read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as why:
            raise MixerError(f"data: the tokenizer {path} cannot be read ({why}).") from None

    @property
    def vocab(self) -> int:
        """Return the number of tokens."""
        return self._tokenizer.get_vocab_size()

    @cached_property
    def sentinels(self) -> list[int]:
        """The tokens that stand for spans, in their order; none if the tokenizer was trained without them."""
        found = (self._tokenizer.token_to_id(SENTINEL.format(i)) for i in count())
        return list(takewhile(lambda token: token is not None, found))

    def starts_word(self) -> Tensor:
        """Return for each token (V,) whether it begins a word: special tokens, and those that begin with a space."""
        begins = torch.zeros(self.vocab, dtype=torch.bool)
        begins[: len(SPECIAL)] = True
        for text, token in self._tokenizer.get_vocab().items():
            begins[token] |= text.startswith(SPACE)
        begins[self.sentinels] = True
        return begins

    @property
    def sha256(self) -> str:
        """Return the sha256 of the tokenizer, which tells it from others."""
        return hashlib.sha256(self.json.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without a start and an end. White space around the text is not kept."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_marked(self, text: str) -> list[int]:
        """Return the tokens of a text in which the names of the mask and of the sentinels stand for these tokens."""
        names = {SPECIAL[MASK]: MASK, **{SENTINEL.format(i): token for i, token in enumerate(self.sentinels)}}
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
        encoded = ([names[part]] if part in names else self.encode(part.strip()) for part in parts if part.strip())
        return [token for tokens in encoded for token in tokens]

    def decode_marked(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, with the names of sentinels between its parts."""
        names = {token: SENTINEL.format(i) for i, token in enumerate(self.sentinels)}
        runs = groupby(tokens, key=names.get)
        return " ".join(text for name, run in runs if (text := name or self.decode(run)))

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of many texts, computed together."""
        numbers = list(range(self.vocab))  # shared, as an integer of one's own for each token is most of the memory
        found: list[list[int]] = []
        parts = range(0, len(texts), TOGETHER)
        for at in with_progress(parts, len(parts), f"cutting {len(texts):,} texts into subwords, part"):
            encoded = self._tokenizer.encode_batch(texts[at : at + TOGETHER], add_special_tokens=False)
            found += ([numbers[token] for token in each.ids] for each in encoded)
        return found

    def counter(self) -> Callable[[str], int]:
        """Return a function that counts the tokens of a text, and remembers texts that it has seen."""
        return cache(lambda text: len(self.encode(text)))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True).strip()

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return each token as readable text; a special one, such as the end, by its name."""
        return [
            SPECIAL[token] if token < len(SPECIAL) else self._tokenizer.decode([token]).strip() or "␣"
            for token in tokens
        ]


def _library() -> ModuleType:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as why:
        raise MixerError(f"subwords need the extra 'text' ({why}): pip install 'tokenmix[text]'.") from None
    return tokenizers
