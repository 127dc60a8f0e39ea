"""Virtual ranks in one process, which count the traffic of real ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import Mixer
from .program import Gather, Program, Scan, Share, Shift, check_scan, check_tokens, mix_share, tree_bytes
from .sharing import forward_of, mixers_of, replace_methods


class Traffic(NamedTuple):
    """What the ranks exchanged in the forward pass; the backward pass returns as much, in the other direction.

    received: the bytes that the busiest rank received. sent: the bytes of all ranks together. rounds: exchanges that
    wait for each other; an all-gather counts ceil(log2 ranks).
    """

    received: int = 0
    sent: int = 0
    rounds: int = 0


class SimWorld:
    """Run mixers on ``ranks`` virtual ranks in one process, each of which knows its own tokens only.

    Args:
        ranks: P, the number of ranks.
        scan: how segments are composed; see ``program.mix_share``.
        latency: seconds that a round takes however little it moves; 1e-5 by default, a guess.
        bandwidth: bytes per second that a rank receives; 1e10 by default, a guess.

    Attributes:
        traffic: what was exchanged since the world was made, or since ``reset``.

    Raises:
        MixerError: if an argument is out of its range.
    """

    def __init__(self, ranks: int, *, scan: Scan | None = None, latency: float = 1e-5, bandwidth: float = 1e10):
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise MixerError(f"SimWorld: expects ranks as a positive integer, got {ranks!r}.")
        check_scan("SimWorld", scan)
        if not latency >= 0 or not bandwidth > 0:
            raise MixerError(
                f"SimWorld: expects latency >= 0 and bandwidth > 0, got latency={latency!r}, bandwidth={bandwidth!r}."
            )
        self.ranks, self.scan, self.latency, self.bandwidth = ranks, scan, latency, bandwidth
        self.traffic = Traffic()

    def reset(self) -> None:
        """Set the counts to 0."""
        self.traffic = Traffic()

    def seconds(self) -> float:
        """Return the time that the traffic takes by the model rounds * latency + received / bandwidth."""
        return self.traffic.rounds * self.latency + self.traffic.received / self.bandwidth

    def mix(
        self,
        mixer: Mixer,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        starts: Sequence[int] = (),
        cuts: Sequence[int] | None = None,
    ) -> Tensor:
        """Mix x (B, T, D) as ``mixer`` does, each rank its share.

        Args:
            positions, key_mask: as in ``Mixer.forward``.
            starts: indices at which a document begins; tokens see their own document only.
            cuts: where shares begin, P - 1 indices that do not fall; None: shares of equal length, or one more.

        Raises:
            MixerError: if the mixer has neither segments nor blocks of keys, or an argument does not fit.
        """
        T = x.shape[1]
        if T == 0:
            raise MixerError("SimWorld: needs at least one token, got an empty sequence.")
        check_tokens(mixer, x, key_mask, positions)
        edges = self._edges(T, cuts)
        programs = []
        for rank, (start, stop) in enumerate(pairwise(edges)):
            mask, at = (None if a is None else a[:, start:stop] for a in (key_mask, positions))
            inside = tuple(s - start for s in starts if start <= s < stop)
            share = Share(x[:, start:stop], mask, at, inside)
            programs.append(mix_share(mixer, share, rank, self.ranks, scan=self.scan))
        return torch.cat(self.run(programs), 1)

    def _edges(self, T: int, cuts: Sequence[int] | None) -> list[int]:
        if cuts is None:
            return [T * rank // self.ranks for rank in range(self.ranks + 1)]
        edges = [0, *cuts, T]
        if len(edges) != self.ranks + 1 or any(a > b for a, b in pairwise(edges)):
            raise MixerError(
                f"SimWorld: cuts must be {self.ranks - 1} indices between 0 and {T} that do not fall, got {list(cuts)}."
            )
        return edges

    def run(self, programs: list[Program]) -> list[Any]:
        """Run one program per rank in lockstep, and return their results."""
        results: list[Any] = [None] * len(programs)
        answers: list[Any] = [None] * len(programs)
        while True:
            asked: list[Gather | Shift] = []
            for rank, program in enumerate(programs):
                try:
                    asked.append(program.send(answers[rank]))
                except StopIteration as end:
                    results[rank] = end.value
            if not asked:
                return results
            answers = self._exchange(asked)

    def _exchange(self, asked: list[Gather | Shift]) -> list[Any]:
        sizes, P = [tree_bytes(each.tree) for each in asked], len(asked)
        received, sent, rounds = self.traffic
        if isinstance(asked[0], Gather):
            everything = [each.tree for each in asked]
            most, together, waits = sum(sizes) - min(sizes), (P - 1) * sum(sizes), (P - 1).bit_length()
            answers: list[Any] = [everything] * P
        else:
            by = asked[0].by
            answers = [asked[rank - by].tree if rank >= by else None for rank in range(P)]
            most, together, waits = max(sizes[: P - by], default=0), sum(sizes[: P - by]), 1
        self.traffic = Traffic(received + most, sent + together, rounds + waits)
        return answers

    @contextlib.contextmanager
    def sharing(self, model: nn.Module) -> Iterator[None]:
        """Within this block, every mixer of ``model`` mixes on the virtual ranks; all else acts on each token alone.

        Raises:
            MixerError: when a mixer is reached that has neither segments nor blocks of keys.
        """
        with replace_methods([(mixer, "forward", forward_of(mixer, self.mix)) for mixer in mixers_of(model)]):
            yield
