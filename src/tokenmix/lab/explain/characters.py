"""Tokenizers of models that read single bytes or characters."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import MixerError
from ..data.characters import CHARACTERS

SHOWN = {" ": "␣", "\n": "⏎", "\t": "⇥"}
"""What stands for characters that cannot be seen."""


class Bytes:
    """The bytes of UTF-8 as tokens: one for each character of English, several for others."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of bytes; the character � stands for those that are no text."""
        return bytes(tokens).decode(errors="replace")

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return each byte as the character that it is alone, else as its number in hexadecimal."""
        return [_visible_character(chr(n)) if n < 128 else f"{n:02X}" for n in tokens]

    def in_context(self, tokens: Iterable[int]) -> list[str]:
        """Return each byte of a text as its character, with the number of the byte where there are several."""
        pieces: list[str] = []
        for character in self.decode(tokens):
            size = len(character.encode())
            pieces += [_visible_character(character)] if size == 1 else [f"{character}{i + 1}" for i in range(size)]
        return pieces


class Characters:
    """The characters of the tasks of arithmetic and strings as tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text.

        Raises:
            MixerError: for other characters.
        """
        if any(c not in CHARACTERS for c in text):
            raise MixerError(
                f"look sentence: the model knows the characters {CHARACTERS}; give a text of these, such as --text "
                + f"'12+345=', got {text!r}."
            )
        return [CHARACTERS.index(c) for c in text]

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        return "".join(self.pieces(tokens))

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return each token as its character; symbols beyond them in angle brackets."""
        return [CHARACTERS[n] if n < len(CHARACTERS) else f"<{n}>" for n in tokens]


def _visible_character(character: str) -> str:
    return SHOWN.get(character, character if character.isprintable() else f"{ord(character):02X}")
