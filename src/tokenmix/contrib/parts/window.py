"""Streaming of mixers whose output depends on the last tokens alone."""

from __future__ import annotations

from ...mixers.parts.history import empty_window, join_rings
from ...mixers.parts.shared import ring_chunk
from ...mixers.segments import Segmented


class WindowMixer(Segmented):
    """A mixer that knows nothing of the past but its last ``halo`` tokens: the state is a ring of their values.

    A subclass says its ``halo`` and mixes a piece: ``_mix_piece(x, state, positions, valid, holes=False)``.
    """

    @property
    def only_halo(self):
        return True

    def empty_state(self, batch_size, *, device, dtype):
        return empty_window(batch_size, self.dim, self.halo, device=device, dtype=dtype)

    def join_states(self, earlier, later, fade):
        return join_rings(earlier, later)[0]

    def mix_chunk(self, x, state, *, positions, key_mask):
        return ring_chunk(self, x, state, positions=positions, key_mask=key_mask)
