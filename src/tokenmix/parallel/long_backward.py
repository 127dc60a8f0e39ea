"""The exact gradient through one sequence of any length, in memory that does not grow with it."""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..mixers import State, state_bytes
from ..system.files import whole_file

Loss = Callable[[Tensor, Tensor], Tensor]
KEPT = 64 << 20  # bytes of states up to which the state at every boundary is kept


class LongGradient(NamedTuple):
    """What ``long_backward`` computed, besides the gradients in ``.grad``.

    loss: the mean over all targets. targets: their number. norm: the norm of the gradient of that mean.
    """

    loss: float
    targets: int
    norm: float


class LongStep(NamedTuple):
    """Progress of ``long_backward`` after one chunk, passed to ``watch``.

    backward: whether the chunk was differentiated, or only read; the rest is then None. start, stop: its tokens. loss:
    the sum of its losses. norm: of what its tokens add to the gradient of the sum of all losses, its own and those of
    all later chunks.
    """

    backward: bool
    start: int
    stop: int
    loss: float | None = None
    norm: float | None = None


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def long_backward(
    model: nn.Module,
    tokens: Tensor,
    *,
    chunk: int = 4096,
    loss: Loss | None = None,
    save: Path | str | None = None,
    save_every: int = 16,
    watch: Callable[[LongStep], None] | None = None,
) -> LongGradient:
    """Add to ``.grad`` the gradient of the mean loss of each next token, through the whole sequence.

    It equals ``loss.backward()`` on all tokens at once. A forward pass keeps the states between chunks, all of them or
    every sqrt(n)-th; the chunks are then computed again from the last to the first, each with the gradient that its
    last state received from the chunk after it. Memory is that of one chunk and of about 2 sqrt(n) states.

    Args:
        model: causal, with ``init_state(rows)`` and ``extend(tokens, state) -> (logits, state)``, such as
            ``models.LM``, in eval mode if it has dropout.
        tokens: (B, T + 1) integers; each of the first T predicts the next. They may be mapped from a file.
        chunk: tokens computed at once.
        loss: maps logits (B, L, V) and targets (B, L) to the sum of the losses; None: cross-entropy.
        save: folder for progress, or None. A call with the same arguments goes on from what it holds, to the same bits,
            whenever the process before was killed.
        save_every: chunks of the backward pass between two saves.
        watch: called after each chunk, for a progress bar or to record how far gradients reach.

    Raises:
        MixerError: if an argument is out of its range, the model does not stream, or ``save`` belongs to another call.
    """
    _check(model, tokens, chunk, save_every)
    folder = None if save is None else Path(save)
    return _Run(model, tokens, chunk, loss or _cross_entropy, folder, save_every, watch or _ignore_step)()


def _ignore_step(step: LongStep) -> None:
    """Do nothing."""


def _check(model: nn.Module, tokens: Tensor, chunk: int, save_every: int) -> None:
    if not hasattr(model, "extend") or not hasattr(model, "init_state"):
        raise MixerError(
            f"long_backward: {type(model).__name__} has no init_state and extend; give a causal model, "
            "such as models.LM."
        )
    for name, value in (("chunk", chunk), ("save_every", save_every)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise MixerError(f"long_backward: {name} must be a positive integer, got {value!r}.")
    if tokens.ndim != 2 or tokens.shape[0] < 1 or tokens.shape[1] < 2 or tokens.is_floating_point():
        raise MixerError(
            "long_backward: needs integer tokens (rows, 2 or more), of which each predicts the next, got "
            f"{tokens.dtype} {tuple(tokens.shape)}."
        )
    drops = any(isinstance(each, nn.Dropout) and each.p > 0 for each in model.modules())
    if model.training and drops:
        raise MixerError("long_backward: computes chunks twice, which dropout would change; call model.eval() first.")


class _Progress(TypedDict):
    """How far a backward pass is: the next chunk, the sums so far, and the gradient of the state after that chunk."""

    next: int
    loss: float
    total: dict[str, Tensor]
    carried: list[Tensor | None] | None


class _Run:
    """One call of ``long_backward``."""

    def __init__(
        self,
        model: Any,
        tokens: Tensor,
        chunk: int,
        loss: Loss,
        folder: Path | None,
        save_every: int,
        watch: Callable[[LongStep], None],
    ):
        self.model, self.tokens, self.chunk, self.loss = model, tokens, chunk, loss
        self.folder, self.save_every, self.watch = folder, save_every, watch
        self.T = tokens.shape[1] - 1
        self.n = -(-self.T // chunk)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise MixerError("long_backward: no parameter of the model requires a gradient.")
        self.device = next(iter(self.parameters.values())).device
        empty = model.init_state(tokens.shape[0])
        self.spec = pytree.tree_structure(empty)
        self.group = 1 if self.n * state_bytes(empty) <= KEPT else isqrt(self.n - 1) + 1
        self.kept: dict[int, State] = {0: empty}

    def __call__(self) -> LongGradient:
        if self.folder is not None:
            self._claim()
        progress = self._progress()
        if progress is None:
            self._forward()
            total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.parameters.items()}
            progress = {"next": self.n - 1, "loss": 0.0, "total": total, "carried": None}
        self._backward(progress)
        count = self.T * self.tokens.shape[0]
        squares = 0.0
        for name, p in self.parameters.items():
            mean = progress["total"][name] / count
            squares += float(mean.square().sum())
            p.grad = mean.to(p.dtype) if p.grad is None else p.grad + mean.to(p.dtype)
        return LongGradient(progress["loss"] / count, count, squares**0.5)

    def _edges(self, i: int) -> tuple[int, int]:
        """Return the first token of chunk i and the one after its last."""
        return i * self.chunk, min((i + 1) * self.chunk, self.T)

    def _tokens(self, i: int) -> tuple[Tensor, Tensor]:
        """Return the tokens of chunk i and their targets."""
        start, stop = self._edges(i)
        both = self.tokens[:, start : stop + 1].to(self.device).long()
        return both[:, :-1], both[:, 1:]

    def _read(self, i: int, state: State) -> State:
        """Return the state after chunk i, without a graph."""
        with torch.no_grad():
            return self.model.extend(self._tokens(i)[0], state)[1]

    def _forward(self) -> None:
        """Keep the state before every ``group``-th chunk."""
        last = (self.n - 1) // self.group * self.group
        first = max((i for i in range(0, last + 1, self.group) if self._has(i)), default=0)
        state = self._state(first)
        for i in range(first, last):
            state = self._read(i, state)
            self.watch(LongStep(False, *self._edges(i)))
            if (i + 1) % self.group == 0:
                self._keep(i + 1, state)

    def _backward(self, progress: _Progress) -> None:
        """Go through the chunks from the last to the first."""
        inner: dict[int, State] = {}
        while progress["next"] >= 0:
            i = progress["next"]
            if i not in inner:
                at = i // self.group * self.group
                inner = {at: self._state(at)}
                for j in range(at, i):
                    inner[j + 1] = self._read(j, inner[j])
            loss, norm = self._chunk(i, inner.pop(i), progress)
            progress["loss"] += loss
            progress["next"] = i - 1
            if self.folder is not None and (i % self.save_every == 0):
                self._write(self.folder / "progress.pt", progress)
            self.watch(LongStep(True, *self._edges(i), loss, norm))

    def _chunk(self, i: int, state: State, progress: _Progress) -> tuple[float, float]:
        """Add the gradients of chunk i to those so far; return its loss and the norm of its gradient."""
        leaves = [a.detach() for a in pytree.tree_leaves(state)]
        leaves = [a.requires_grad_() if a.is_floating_point() else a for a in leaves]
        inputs, targets = self._tokens(i)
        with torch.enable_grad():
            logits, after = self.model.extend(inputs, pytree.tree_unflatten(leaves, self.spec))
            value = self.loss(logits, targets)
        outputs, cotangents = [value], [torch.ones_like(value)]
        if progress["carried"] is not None:
            for a, g in zip(pytree.tree_leaves(after), progress["carried"], strict=True):
                if g is not None and a.requires_grad:
                    outputs.append(a)
                    cotangents.append(g)
        wanted = [a for a in leaves if a.requires_grad]
        found = torch.autograd.grad(outputs, [*self.parameters.values(), *wanted], cotangents, allow_unused=True)
        squares = 0.0
        for name, g in zip(self.parameters, found, strict=False):
            if g is not None:
                progress["total"][name] += g
                squares += float(g.double().square().sum())
        of_state = iter(found[len(self.parameters) :])
        progress["carried"] = [next(of_state) if a.requires_grad else None for a in leaves]
        return float(value.detach().double()), squares**0.5

    def _claim(self) -> None:
        """Mark the folder as this call's, or refuse one of another call."""
        assert self.folder is not None
        digest = hashlib.sha256()
        for name, a in {"tokens": self.tokens, **self.model.state_dict()}.items():
            kept = a.detach().cpu().contiguous()
            digest.update(f"{name} {kept.dtype} {tuple(kept.shape)}".encode())
            digest.update((ctypes.c_char * kept.nbytes).from_address(kept.data_ptr()) if kept.nbytes else b"")
        mine = {"tokens": list(self.tokens.shape), "chunk": self.chunk, "group": self.group, "hash": digest.hexdigest()}
        path = self.folder / "call.json"
        if not path.exists():
            with whole_file(path) as f:
                f.write(json.dumps(mine).encode())
        elif json.loads(path.read_bytes()) != mine:
            raise MixerError(
                f"long_backward: {self.folder} holds the progress of another call (other tokens, weights or chunk); "
                "give another folder."
            )

    def _progress(self) -> _Progress | None:
        path = None if self.folder is None else self.folder / "progress.pt"
        if path is None or not path.exists():
            return None
        return self._load(path)

    def _has(self, i: int) -> bool:
        return i in self.kept or self.folder is not None and self._path(i).exists()

    def _path(self, i: int) -> Path:
        assert self.folder is not None
        return self.folder / f"state_{i:09d}.pt"

    def _state(self, i: int) -> State:
        return self.kept[i] if i in self.kept else pytree.tree_unflatten(self._load(self._path(i)), self.spec)

    def _keep(self, i: int, state: State) -> None:
        if self.folder is None:
            self.kept[i] = state
        else:
            self._write(self._path(i), pytree.tree_leaves(state))

    def _load(self, path: Path) -> Any:
        return torch.load(path, map_location=self.device, weights_only=True)

    def _write(self, path: Path, value: object) -> None:
        with whole_file(path) as f:
            torch.save(value, f)
