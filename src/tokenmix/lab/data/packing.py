"""Rows that hold several texts, and which of them are in the batch of a step: a pure function of (seed, step)."""

from __future__ import annotations

from bisect import bisect_left, insort

from .sampler import mix64, permute_index


def pack(lengths: list[int], most: int) -> list[list[int]]:
    """Put texts of these lengths into rows of ``most`` tokens, longest first, each where it leaves the least room.

    Returns:
        The texts in each row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # room and row, in order
    for text in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect_left(open_rows, (lengths[text], 0))
        if at == len(open_rows):
            room, row = most, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(at)
        rows[row].append(text)
        if room > lengths[text]:
            insort(open_rows, (room - lengths[text], row))
    return rows


class PackedRows:
    """Which texts are in the batch of a step: every epoch visits each row of texts once, in a new order.

    Args:
        lengths: tokens of each text, at most ``most``.
        most: tokens of a row.
        batch_size: rows in a batch; the last of an epoch may have fewer.
        seed: seed of all orders.
    """

    def __init__(self, lengths: list[int], *, most: int, batch_size: int, seed: int = 0):
        self.packed, self.batch_size, self.seed = pack(lengths, most), batch_size, seed

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return -(-len(self.packed) // self.batch_size)

    def rows(self, step: int) -> list[list[int]]:
        """Return the texts in each row of the batch of a step."""
        epoch, rank = divmod(step, len(self))
        key = mix64(self.seed * 0x9E3779B97F4A7C15 + epoch)
        first = rank * self.batch_size
        last = min(first + self.batch_size, len(self.packed))
        return [self.packed[permute_index(i, len(self.packed), key)] for i in range(first, last)]
