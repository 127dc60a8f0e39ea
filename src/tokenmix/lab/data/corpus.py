"""A corpus: one file of bytes, memory-mapped, with three splits."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ...errors import MixerError
from .cache import map_file
from .inventory import Inventory

SPLITS = ("train", "valid", "test")


def check_split(who: str, name: str, held: Container[str] = SPLITS) -> None:
    """Refuse the name of a split that a set does not hold."""
    if name not in held:
        raise MixerError(f"{who}: there is no split {name!r}; choose one of {', '.join(SPLITS)}.")


@dataclass(frozen=True)
class Corpus:
    """Bytes on disk with three splits. The file is mapped, never copied, so all readers share the same pages.

    Args:
        bounds: ends of train, valid and test, in bytes.
        inventory: what was found and what was left out; None: of a corpus with a name.
    """

    name: str
    path: Path
    size: int
    sha256: str
    bounds: tuple[int, int, int]
    inventory: Inventory | None = field(default=None, compare=False)

    def bytes(self) -> Tensor:
        """Map the whole corpus, uint8 (size,); it is read-only by convention."""
        return map_file(self.path, self.size)

    def split(self, name: str) -> Tensor:
        """Return one of the splits, uint8, as a view of the map."""
        check_split(f"corpus {self.name}", name)
        cuts = (0, *self.bounds)
        i = SPLITS.index(name)
        return self.bytes()[cuts[i] : cuts[i + 1]]

    def check_length(self, seq_len: int) -> None:
        """Refuse a corpus that is too short.

        Its training split must hold a full sequence and the next byte, its other splits something to score.
        """
        train, valid, test = self.bounds[0], self.bounds[1] - self.bounds[0], self.bounds[2] - self.bounds[1]
        if train < seq_len + 1:
            raise MixerError(
                f"corpus {self.name} ({self.path}) is too short: "
                + f"its training split has {train} bytes, one sequence of seq_len={seq_len} needs {seq_len + 1}."
            )
        if min(valid, test) < 2:
            raise MixerError(
                f"corpus {self.name} ({self.path}) is too short: "
                + f"the splits have {train}, {valid} and {test} bytes, each needs at least 2."
            )


def cut(size: int, parts: tuple[float, float, float]) -> tuple[int, int, int]:
    """Return the bounds of splits in the proportions ``parts``."""
    total = sum(parts)
    if len(parts) != 3 or min(parts) < 0 or not 0 < total < math.inf:
        raise MixerError(f"data.split must be three proportions like [90, 5, 5], got {list(parts)}.")
    return int(size * parts[0] / total), int(size * (parts[0] + parts[1]) / total), size
