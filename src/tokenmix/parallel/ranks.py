"""Split one sequence over the ranks of a ``torch.distributed`` group, each of which holds a share of its tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import Mixer
from .messages import Group, Tree, gather_trees, shift_tree
from .program import Gather, Program, Scan, Share, Shift, check_scan, check_shares, mix_share, tree_bytes
from .sharing import Method, forward_of, mixers_of, replace_methods

TEXT = 400
"""Bytes of an error message that are sent to the other ranks."""
TOGETHER = 2**25
"""Numbers of gradients that are summed as one message, which is a copy of them."""


class AgreedError(MixerError):
    """An error that every rank of the group raises at the same exchange."""


class _Before(NamedTuple):
    """What lies to the left of a share.

    counted (B,): the tokens of each row that count as positions. tokens: of all shares together. alike: whether
    documents begin at the same tokens in all rows, on every rank.
    """

    counted: Tensor
    tokens: int
    alike: bool


class Ranks:
    """A group of ranks that share sequences, seen from this rank; made by ``context_parallel``.

    Attributes:
        rank: this rank in the group.
        ranks: P, their number.

    Raises:
        MixerError: if torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, group: Group = None, *, scan: Scan | None = None, who: str = "context_parallel"):
        check_scan(who, scan)
        if not dist.is_available() or not dist.is_initialized():
            raise MixerError(
                f"{who}: torch.distributed is not initialised; start the ranks with torchrun and call "
                'torch.distributed.init_process_group("gloo") first.'
            )
        if hasattr(group, "get_group"):  # a DeviceMesh
            if group.ndim != 1:
                raise MixerError(
                    f'{who}: the mesh has {group.ndim} dimensions; give the one of the shares, such as mesh["cp"].'
                )
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise MixerError(f"{who}: this process, rank {dist.get_rank()} of all, is not in the group.")
        self.who, self.group, self.scan = who, group, scan
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._inside, self._rows, self._placed = False, 0, False
        self._documents: tuple[Tensor, bool] | None = None

    def mix(
        self,
        mixer: Mixer,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        starts: Sequence[int] = (),
    ) -> Tensor:
        """Mix this rank's share x (B, L, D), L >= 0, of one sequence as ``mixer`` mixes the whole.

        Args:
            positions: (B, L), of the whole sequence, on every rank or on none; None: counted.
            key_mask: (B, L) bool, False marks padding; None: there is none.
            starts: indices in the share at which a document begins; tokens see their own document only.

        Raises:
            MixerError: on every rank, if one refuses.
        """
        with self.share_errors():
            self._rows, self._placed = x.shape[0], positions is not None
            share = Share(x, key_mask, positions, tuple(starts))
            return self._run(mix_share(mixer, share, self.rank, self.ranks, scan=self.scan), x)

    def _run(self, program: Program, x: Tensor) -> Tensor:
        """Carry out the exchanges that a program requests, and tie its outputs to their autograd chain."""
        chain = x.new_zeros(())
        if torch.is_grad_enabled():  # from here on every rank has a graph, whatever its share
            chain = x.new_zeros((), requires_grad=True) + x[:0].sum()
        answer = None
        while True:
            try:
                asked = program.send(answer)
            except StopIteration as end:
                return end.value + chain
            answer, chain = self._exchange(asked, chain)

    def all_gather(self, mine: Tree) -> list[Tree]:
        """All-gather a tree of tensors, without gradients; return one tree for each rank."""
        with torch.no_grad():
            return self._exchange(Gather(mine), torch.zeros((), device="cpu"))[0]

    def _exchange(self, asked: Gather | Shift, chain: Tensor) -> tuple[Any, Tensor]:
        by = asked.by if isinstance(asked, Shift) else 0
        self._agree(1 + by, tree_bytes(asked.tree))
        if isinstance(asked, Shift):
            return shift_tree(self.group, asked.tree, by, chain)
        return gather_trees(self.group, asked.tree, chain)

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        """Within this block an error on one rank is raised on all, at their next exchange or at the end."""
        if self._inside:
            yield
            return
        self._inside = True
        try:
            yield
            self._agree(0, 0)
        except AgreedError:
            raise
        except Exception as error:
            self._header([1, 0, 0, 0, 0, 0])
            self._texts(str(error) or type(error).__name__)
            raise
        finally:
            self._inside = False

    def _header(self, mine: list[int]) -> list[list[int]]:
        """Return the headers of all ranks."""
        every = [torch.empty(len(mine), dtype=torch.long, device="cpu") for _ in range(self.ranks)]
        dist.all_gather(every, torch.tensor(mine, dtype=torch.long, device="cpu"), group=self.group)
        return [each.tolist() for each in every]

    def _texts(self, mine: str) -> list[str]:
        """All-gather the first line of a text; return one for each rank."""
        said = (mine.splitlines() or [""])[0].encode()[:TEXT]
        every = [torch.empty(TEXT, dtype=torch.uint8, device="cpu") for _ in range(self.ranks)]
        own = torch.tensor([*said.ljust(TEXT, b"\0")], dtype=torch.uint8, device="cpu")
        dist.all_gather(every, own, group=self.group)
        return [bytes(each.tolist()).rstrip(b"\0").decode(errors="ignore") for each in every]

    def _agree(self, kind: int, size: int) -> None:
        """Make sure that all ranks are about to do the same, or raise one error on all.

        Without this, messages of unequal size end in a hang or in an error of the backend that names neither.
        """
        every = self._header(
            [0, kind, self._rows if kind else 0, size, int(torch.is_grad_enabled()), int(self._placed)]
        )
        if any(each[0] for each in every):
            rank, text = next((rank, text) for rank, text in enumerate(self._texts("")) if text)
            raise AgreedError(f"{self.who}: rank {rank} stopped: {text}")
        rows = [each[2] for each in every]
        if len(set(rows)) > 1 and len({each[1] for each in every}) == 1:
            raise AgreedError(
                f"{self.who}: all shares must have the same rows, got {rows} of ranks 0 to {self.ranks - 1}."
            )
        if any(each != every[0] for each in every):
            raise AgreedError(
                f"{self.who}: the ranks are at different exchanges; give all the same model, dtypes and grad mode, and "
                "positions to all or to none."
            )

    def methods(self, model: nn.Module) -> list[Method]:
        """Return the methods that ``model`` and its parts have while they share sequences."""
        mixers = mixers_of(model)
        if not mixers:
            raise MixerError(
                f"{self.who}: {type(model).__name__} has no mixer of tokenmix, so its ranks would not see each other."
            )
        for mixer in mixers:
            check_shares(mixer)
        found: list[Method] = []
        for mixer in mixers:
            found.append((mixer, "forward", forward_of(mixer, self.mix)))
            found.append((mixer, "forward_packed", self._packed_of(mixer)))
        # asked by a flag, because `import tokenmix` needs no models
        for trunk in (each for each in model.modules() if hasattr(type(each), "reads_shares")):
            name = type(trunk).__name__
            if not trunk.reads_shares:
                raise MixerError(f"{self.who}: of our models only LM knows the positions of a share, got {name}.")
            if getattr(getattr(trunk, "positions", None), "reads_tokens", False):
                raise MixerError(f"{self.who}: positions of digits need all tokens; build the LM with others.")
            found.append((trunk, "forward", self._forward_of(trunk)))
        if not isinstance(model, Mixer) and not getattr(type(model), "reads_shares", False):
            whole = model.forward

            def forward(*args: object, **given: object) -> object:
                with self.share_errors():
                    return whole(*args, **given)

            found.append((model, "forward", forward))
        return found

    def _packed_of(self, mixer: Mixer) -> Callable[[Tensor, Tensor], Tensor]:
        def forward_packed(x: Tensor, cu_seqlens: Tensor) -> Tensor:
            if self._documents is None:
                mixer.refuse("cannot tell the shares of packed sequences; call the model with starts")
            starts, alike = self._documents
            rows = x.view(*starts.shape, x.shape[-1])
            parts = [(rows, starts[:1])] if alike else list(zip(rows.split(1), starts.split(1), strict=True))
            mixed = [self.mix(mixer, part, starts=begin[0].nonzero()[:, 0].tolist()) for part, begin in parts]
            return torch.cat(mixed).view_as(x)

        return forward_packed

    def _forward_of(self, model: Any) -> Callable[..., Tensor]:
        """Return the ``forward`` of an LM that reads a share: positions count from the beginning of the sequence."""
        whole, packed, placed = type(model).forward, type(model).packed_positions, type(model).embed_at

        def forward(tokens: Tensor, *, key_mask: Tensor | None = None, starts: Tensor | None = None) -> Tensor:
            with self.share_errors():
                if model.training and model.config.sample_positions is not None:
                    raise MixerError(f"{self.who}: sampled positions need all tokens; call model.eval().")
                model.check_symbols(tokens)
                index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
                if starts is not None:
                    packed(model, tokens, starts, key_mask)  # refuses what cannot be meant
                before = self._count_before(tokens, key_mask, starts)
                longest = model.max_len
                if longest is not None and before.tokens > longest:
                    raise MixerError(
                        f"LM: the model was built with max_len={longest}, got {before.tokens} tokens on all ranks; "
                        "shorten them, or build with a larger max_len."
                    )
                count = before.counted[:, None]

                def shared_placed(tokens: Tensor, at: Tensor) -> Tensor:
                    if starts is None:
                        at = torch.where(count > 0, count + index, at)
                    return placed(model, tokens, at)

                def shared_packed(tokens: Tensor, starts: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
                    last = torch.where(starts, index, -1).cummax(1).values
                    at = torch.where(last < 0, count + index, index - last)
                    return at, packed(model, tokens, starts, key_mask)[1]

                self._documents = None if starts is None else (starts, before.alike)
                try:
                    with replace_methods(
                        [(model, "embed_at", shared_placed), (model, "packed_positions", shared_packed)]
                    ):
                        return whole(model, tokens, key_mask=key_mask, starts=starts)
                finally:
                    self._documents = None

        return forward

    def _count_before(self, tokens: Tensor, key_mask: Tensor | None, starts: Tensor | None) -> _Before:
        """Ask all ranks how many tokens they hold, and count those to the left."""
        rows, length = tokens.shape
        tail = torch.full((rows,), length, device=tokens.device)
        cut, alike = torch.zeros_like(tail, dtype=torch.bool), True
        if key_mask is not None:
            tail = (key_mask.cumsum(1) > 0).sum(1)
        if starts is not None:
            cut, alike = starts.any(1), bool((starts == starts[:1]).all())
            tail = tail - torch.where(starts, torch.arange(length, device=tokens.device), 0).amax(1) if length else tail
        self._rows, self._placed = rows, False
        every = self.all_gather((tail, cut, torch.tensor([length, alike], device=tokens.device)))
        count = torch.zeros_like(tail)
        for tail, cut, other in every[: self.rank]:
            count = torch.where(~cut & (count > 0), count + other[0], tail)
        return _Before(count, sum(int(each[0]) for *_, each in every), all(bool(each[1]) for *_, each in every))


@contextlib.contextmanager
def context_parallel(model: nn.Module, group: Group = None, *, scan: Scan | None = None) -> Iterator[Ranks]:
    """Within this block, each rank of a group calls ``model`` on its own share of one sequence.

    Shares are consecutive, in the order of the ranks; they may be uneven or empty. Every mixer exchanges what
    ``SimWorld`` does, and all else must act on each token alone. The outputs are those of this rank's tokens. Gradients
    flow back through the exchanges, so every rank calls ``backward``, on a loss that its outputs reach, be it a sum
    over no tokens; then ``sum_gradients``.

    An ``LM`` counts positions from the beginning of the sequence, and takes padding (``key_mask``) and documents
    (``starts``, (B, L) bool) of the share. Another model gives its mixers positions of the whole sequence, or none.

    Args:
        model: the same on every rank, with causal mixers that have segments or blocks of keys.
        group: a process group, or a DeviceMesh of one dimension; None: all processes.
        scan: how segments are composed; see ``program.mix_share``.

    Yields:
        ``Ranks``, whose ``mix`` runs a single mixer on a share.

    Raises:
        MixerError: if torch.distributed is not initialised or a mixer has neither; within the block on every rank,
            if one refuses its share or shares differ in rows.
    """
    ranks = Ranks(group, scan=scan)
    with ranks.share_errors():
        methods = ranks.methods(model)
    with replace_methods(methods):
        yield ranks


def sum_gradients(model: nn.Module, group: Group = None) -> None:
    """Replace the gradient of each parameter by its sum over the ranks of a group, the same on all.

    Call it after ``backward``. A parameter that no rank has a gradient of keeps None.

    Args:
        group: as in ``context_parallel``.

    Raises:
        MixerError: on every rank, if their models differ.
    """
    ranks = Ranks(group, who="sum_gradients")
    parameters = [p for p in model.parameters() if p.requires_grad]
    with ranks.share_errors(), torch.no_grad():
        there = torch.tensor([[p.numel(), p.grad is not None] for p in parameters], device="cpu").view(-1, 2)
        every = ranks.all_gather(there)
        if any(not torch.equal(each[:, 0], there[:, 0]) for each in every):
            raise MixerError("sum_gradients: the parameters differ in size between ranks; give all the same model.")
        used = torch.stack([each[:, 1] for each in every]).any(0).tolist()
        live = [p for p, wanted in zip(parameters, used, strict=True) if wanted]
        for dtype in dict.fromkeys(p.dtype for p in live):
            for some in _messages_of([p for p in live if p.dtype == dtype]):
                grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in some]
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                dist.all_reduce(flat, group=ranks.group)
                for p, grad, total in zip(some, grads, flat.split([p.numel() for p in some]), strict=True):
                    p.grad = grad.copy_(total.view_as(p))


def _messages_of(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters whose gradients are sent together: at most ``TOGETHER`` numbers, or one parameter."""
    found: list[nn.Parameter] = []
    numbers = 0
    for p in parameters:
        if found and numbers + p.numel() > TOGETHER:
            yield found
            found, numbers = [], 0
        found.append(p)
        numbers += p.numel()
    if found:
        yield found


class _Shared(torch.autograd.Function):
    """The sum over ranks of a number that each of them computed a part of; it is one loss, so its gradient is 1."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, group: Group) -> Tensor:
        total = total.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def shared_mean(total: Tensor, count: int, group: Group = None) -> Tensor:
    """Return the mean over the targets of all ranks, the same number on each, to call ``backward`` on.

    Its gradient on a rank is that of the mean with respect to what this rank computed; ``sum_gradients`` then gives the
    gradient of the mean. It is no mean of means: ranks may hold different numbers of targets, or none.

    Args:
        total: the sum of this rank's losses, a number.
        count: the number of its targets.
        group: as in ``context_parallel``.

    Raises:
        MixerError: on every rank, if there is no target at all or a total is no single number.
    """
    ranks = Ranks(group, who="shared_mean")
    with ranks.share_errors():
        if total.ndim or not total.is_floating_point():
            raise MixerError(f"shared_mean: total must be one number, got {total.dtype} {tuple(total.shape)}.")
        every = ranks.all_gather(torch.tensor([count, total.element_size()], device="cpu"))
        targets = sum(int(each[0]) for each in every)
        if targets < 1:
            raise MixerError("shared_mean: no rank has a target; give at least one.")
        if len({int(each[1]) for each in every}) > 1:
            raise MixerError("shared_mean: totals have different dtypes; compute all losses in one.")
        return _Shared.apply(total, ranks.group) / targets  # type: ignore[no-untyped-call,no-any-return]
