"""A corpus: one file of bytes, memory-mapped, with three splits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import MixerError
from .cache import mapped

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpus:
    """Bytes on disk and where they are cut. The file is mapped, never copied: every reader shares the same pages.

    Args:
        bounds: the three cuts (end of train, end of valid, end of test).
    """

    name: str
    path: Path
    size: int
    sha256: str
    bounds: tuple[int, int, int]

    def bytes(self) -> Tensor:
        """The whole corpus, uint8 (size,), as a read-only-by-convention map of the file."""
        return mapped(self.path, self.size)

    def split(self, name: str) -> Tensor:
        """One of the splits, uint8, as a view of the map."""
        if name not in SPLITS:
            raise MixerError(f"corpus {self.name}: no split is called {name!r}; choose one of {', '.join(SPLITS)}.")
        cuts = (0, *self.bounds)
        i = SPLITS.index(name)
        return self.bytes()[cuts[i] : cuts[i + 1]]

    def check_length(self, seq_len: int) -> None:
        """Refuse a corpus whose training split holds no full sequence and its next byte, or whose other splits hold nothing to score."""
        train, valid, test = self.bounds[0], self.bounds[1] - self.bounds[0], self.bounds[2] - self.bounds[1]
        if train < seq_len + 1:
            raise MixerError(
                f"corpus {self.name} ({self.path}) is too short: its training split has {train} bytes, one sequence of seq_len={seq_len} needs {seq_len + 1}."
            )
        if min(valid, test) < 2:
            raise MixerError(f"corpus {self.name} ({self.path}) is too short: the splits have {train}, {valid} and {test} bytes, each needs at least 2.")


def cut(size: int, parts: tuple[float, float, float]) -> tuple[int, int, int]:
    """The bounds of splits in the proportions ``parts``."""
    total = sum(parts)
    if len(parts) != 3 or min(parts) < 0 or total <= 0:
        raise MixerError(f"data.split must be three proportions like [90, 5, 5], got {list(parts)}.")
    return int(size * parts[0] / total), int(size * (parts[0] + parts[1]) / total), size
