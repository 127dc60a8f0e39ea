"""Generate on the CPU without Python between the tokens: one call of the C library computes a token's whole step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..kernels import cpu
from ..kernels.backend import default_backend
from ..kernels.cpu.plan import Plan
from ..kernels.recording import Narrow, NotRecordable, Recorder, recorder
from ..mixers import State
from ..mixers.attention import Attention, AttentionState, ReservedState
from .blocks import Block

Weights = Literal["bfloat16", "int8"]
"""Dtypes in which a decoder may hold the weights of products, instead of the model's own."""


class KnownTensors:
    """The parameters and buffers of a model as they were when a decoder was made; compared before each token."""

    def __init__(self, model: Any):
        found = [
            (owner, name, t)
            for module in model.modules()
            for owner in (module._parameters, module._buffers)
            for name, t in owner.items()
            if t is not None
        ]
        self.tensors = [t for _, _, t in found]
        self._owners, self._names = [owner for owner, _, _ in found], [name for _, name, _ in found]
        self._versioned = [t for t in self.tensors if not t.is_inference()]
        self._addresses, self._versions = self._read()

    def _read(self) -> tuple[list[int], list[int]]:
        return list(map(Tensor.data_ptr, self.tensors)), list(map(_VERSION, self._versioned))

    def find_changed(self) -> str | None:
        """Return the name of a tensor that was replaced or moved, or whose numbers were written to."""
        now = list(map(dict.get, self._owners, self._names))
        addresses, versions = self._read()
        if all(map(is_, now, self.tensors)) and addresses == self._addresses and versions == self._versions:
            return None
        written = {id(t) for t, a, b in zip(self._versioned, versions, self._versions, strict=True) if a != b}
        places = zip(addresses, self._addresses, strict=True)
        for name, t, new, (a, b) in zip(self._names, self.tensors, now, places, strict=True):
            if new is not t or a != b or id(t) in written:
                return name
        return None


class Decoder:
    """Run ``model.extend`` for one token per row as one call of the C library, planned once.

    It replaces the model wherever ``extend`` is called, and is the ``decoder=`` of ``LM.generate``. The numbers are
    those of ``extend`` but for rounding. What no plan repeats is called in Python between the planned parts;
    ``in_python`` names it and says why. Logits and state are held in the decoder's own memory, which its next step
    overwrites; a state from elsewhere, such as ``prefill`` or a reordered one, is copied in. A decoder is for one
    thread.

    Args:
        model: an ``LM`` on the CPU in eval mode.
        batch_size: rows of every step.
        max_len: tokens for which the keys and values of softmax attention get memory; None: the config's.
        weights: "bfloat16" or "int8" rounds the weights of products, the latter with one scale per row; None: as they
            are.

    Raises:
        MixerError: for a model on another device, in training mode, with hooks, or with a mixer that does not stream.
    """

    def __init__(self, model: Any, batch_size: int = 1, *, max_len: int | None = None, weights: Weights | None = None):
        self.max_len = model.config.max_len if max_len is None else max_len
        _refuse_unfit(model, batch_size, self.max_len, weights)
        self.model, self.weights = model, weights
        self.state: Any
        self.in_python: list[str] = []
        self._known = KnownTensors(model)
        with torch.no_grad():
            fresh = model.init_state(batch_size)
            self._token = torch.zeros(batch_size, 1, dtype=torch.long)
            self._ids = (ctypes.c_int64 * batch_size).from_address(self._token.data_ptr())
            self._position = fresh.position.clone()
            self._kind = type(fresh)
            self._held: dict[int, list[Tensor]] = {}  # memory of the states of planned parts
            self._states: list[State] = [fresh.run, *fresh.layers]  # of each part but the last
            self._pending: dict[int, State] = {}
            self._reserved: dict[int, ReservedState] = {}
            self._parts: list[Plan | Callable[[], None]] = []
            self._finish = Plan()
            self._logits = self._plan_parts(None if weights is None else _NARROW[weights])
            self._plan_after().extend(self._finish)
            self._load(fresh)

    def extend(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Process the next token of each row (B, 1) after a state.

        Returns:
            The logits (B, 1, vocab), and the new state.

        Raises:
            MixerError: for another shape, for tokens outside of the vocabulary, beyond the model's ``max_len``, and if
                the model has changed since the decoder was made.
        """
        ids = self._check_tokens(tokens)
        self._check_model()
        if state is not self.state:
            self._load(state)
        self._check_length()
        for i, each in enumerate(ids):
            self._ids[i] = each
        for part in self._parts:
            if not isinstance(part, Plan):
                part()
            elif not part.run():  # numbers that are not finite take the long way, which marks them
                return self._extend_model(tokens)
        self._count += 1
        if self._left is not None:
            self._left -= 1
        if self._pending or self._reserved:
            for i, new in self._pending.items():
                self._states[i] = new
            self._pending.clear()
            self.state = self._whole_state()
        return self._logits, self.state

    @torch.no_grad()
    def _extend_model(self, tokens: Tensor) -> tuple[Tensor, Any]:
        logits, state = self.model.extend(tokens, self.state)
        self._load(state)
        return logits, self.state

    def _plan_parts(self, narrow: Narrow | None) -> Tensor:
        """Plan the embedding, each application of a block, and the head; return the logits' memory."""
        model, loop, count = self.model, self.model.loop, len(self.model.blocks)
        x = self._add_part("the embedding", self._embed_token, self._token, 0, narrow)
        s = x if loop is None else self._add_part("the loop", lambda x, _: (loop.begin(x), ()), x, None, narrow)
        for i in range(count * model.times):
            block = model.blocks[i % count]

            def extend_block(s: Tensor, state: State, block: Block = block, n: int = i % count) -> tuple[Tensor, State]:
                return _extend_block(block, s if loop is None else loop.inject(s, x, n), state)

            attention = block.mixer if isinstance(block.mixer, Attention) else None
            s = self._add_part(
                f"block {i % count}, {type(block.mixer).__name__}", extend_block, s, i + 1, narrow, attention
            )
        self._finish.map("shift", self._position, self._position, number=1)
        return self._add_part("the head", lambda s, _: (model.logits(model.norm(s)), ()), s, None, narrow)

    def _embed_token(self, token: Tensor, run: tuple[Tensor, ...]) -> tuple[Tensor, State]:
        return self.model.embed_run(token, self._position[:, None], None, run)

    def _add_part(
        self,
        name: str,
        compute: Callable[[Tensor, State], tuple[Tensor, State]],
        x: Tensor,
        index: int | None,
        narrow: Narrow | None,
        mixer: Attention | None = None,
    ) -> Tensor:
        """Append a part that computes a tensor from x and the state at ``index``; return the tensor, in fixed memory.

        It is planned if a plan can repeat it, and otherwise called.
        """
        whole, state = self._plan_after(), () if index is None else self._states[index]
        plan = Plan(whole)
        kept = mixer.reserve(state, self.max_len) if mixer is not None and isinstance(state, AttentionState) else None
        leaves, tree = pytree.tree_flatten(state if kept is None else kept)
        own = [leaf.clone(memory_format=torch.contiguous_format) for leaf in leaves]
        held = pytree.tree_unflatten(own, tree)
        try:
            with Recorder(plan, self._known.tensors, narrow):
                y, new = compute(x, held)
        except NotRecordable as why:
            self.in_python.append(f"{name}: {why}")
            y = torch.empty_like(compute(x, state)[0])

            @torch.no_grad()
            def call() -> None:
                result, new = compute(x, self._states[index or 0])
                y.copy_(result)
                if index is not None:
                    self._pending[index] = new

            self._parts.append(call)
            return y
        self._carry(own, pytree.tree_leaves(new))
        if index is not None:
            self._states[index], self._held[index] = held, own
            if isinstance(held, ReservedState):
                self._reserved[index] = held
        whole.extend(plan)
        return y

    def _plan_after(self) -> Plan:
        """Return the plan to which what comes next is added."""
        if not self._parts or not isinstance(self._parts[-1], Plan):
            self._parts.append(Plan())
        last = self._parts[-1]
        assert isinstance(last, Plan)
        return last

    def _carry(self, own: list[Tensor], new: list[Tensor]) -> None:
        """Plan that the new state takes the place of the old one, once all parts have run."""
        places = {leaf.untyped_storage().data_ptr() for leaf in own}
        last = Plan()
        for old, leaf in zip(own, new, strict=True):
            if leaf.data_ptr() == old.data_ptr() and leaf.stride() == old.stride():
                continue
            if leaf.untyped_storage().data_ptr() in places:  # read before it is overwritten
                copy = torch.empty_like(old)
                self._finish.map("copy", copy, leaf)
                leaf = copy
            last.map("copy", old, leaf)
        self._finish.extend(last)

    def _whole_state(self) -> State:
        run, *layers = [
            self._reserved[i].first(self._count) if i in self._reserved else each for i, each in enumerate(self._states)
        ]
        return self._kind(tuple(layers), self._position, run)

    @torch.no_grad()
    def _load(self, state: Any) -> None:
        """Copy a state into the decoder's memory."""
        given = [state.run, *state.layers]
        if len(given) != len(self._states) or state.position.shape != self._position.shape:
            rows, layers = len(self._token), len(self._states) - 1
            got = f"{tuple(state.position.shape)} positions and {len(given) - 1} layers"
            raise MixerError(f"Decoder: was made for a state of {rows} rows and {layers} layers, got {got}.")
        counts = {given[i].valid.shape[1] for i in self._reserved}
        if len(counts) > 1 or max(counts, default=0) > self.max_len:
            got = f"states of {', '.join(map(str, sorted(counts)))} tokens"
            raise MixerError(
                f"Decoder: has memory for {self.max_len} tokens, got {got}; make one with a larger max_len."
            )
        self._count = max(counts, default=0)
        for i, each in enumerate(given):
            if i not in self._held:
                self._states[i] = each
                continue
            own, leaves = self._held[i], pytree.tree_leaves(each)
            if i in self._reserved:
                kept = self._reserved[i]
                kept.number.fill_(self._count)
                own = pytree.tree_leaves(kept.first(self._count))
            found, wanted = ([tuple(leaf.shape) for leaf in some] for some in (leaves, own))
            if found != wanted:
                raise MixerError(f"Decoder: was made for states of shapes {wanted}, got {found}.")
            for mine, leaf in zip(own, leaves, strict=True):
                mine.copy_(leaf)
        self._position.copy_(state.position)
        limit = self.model.max_len
        self._left = None if limit is None else limit - int(self._position.max())
        self._pending.clear()
        self.state = self._whole_state()

    def _check_tokens(self, tokens: Tensor) -> list[int]:
        """Return the tokens' numbers; refuse what the embedding has no rows for."""
        if tokens.shape != self._token.shape or tokens.dtype not in _WHOLE:
            wanted, got = tuple(self._token.shape), f"{tokens.dtype} {tuple(tokens.shape)}"
            raise MixerError(f"Decoder: was made for integer tokens of shape {wanted}, got {got}.")
        ids: list[int] = tokens.flatten().tolist()
        vocab = self.model.vocab
        for each in ids:
            if not 0 <= each < vocab:
                raise MixerError(f"Decoder: tokens must be in 0..{vocab - 1}, got {each}.")
        return ids

    def _check_length(self) -> None:
        """Refuse a token beyond the lengths of the model and of the reserved memory."""
        if self._left is not None and self._left < 1:
            limit = f"max_len={self.model.max_len}"
            raise MixerError(f"Decoder: the model was built with {limit} and has read as many tokens; stop here.")
        if self._reserved and self._count >= self.max_len:
            raise MixerError(
                f"Decoder: has memory for {self.max_len} tokens, which are read; make one with a larger max_len."
            )

    def _check_model(self) -> None:
        """Refuse a model whose numbers are no longer those of the plan."""
        name = self._known.find_changed()
        if name is not None:
            which = f"the model's {name} was trained, moved or replaced since this decoder was made"
            raise MixerError(f"Decoder: {which}; make another with model.decoder().")
        if self.model.training:
            raise MixerError("Decoder: the model is in training mode; call model.eval().")


def _extend_block(block: Block, x: Tensor, state: State) -> tuple[Tensor, State]:
    """Extend a block, of attention also over a state in reserved memory."""
    plan = recorder()
    if not isinstance(state, ReservedState):
        return block.extend(x, state)
    if plan is None or not isinstance(block.mixer, Attention) or block.cross is not None:
        raise NotRecordable("attention within another block")
    mixed, new = block.mixer.mix_reserved(block.branch_input(x, block.mixer_norm), state, plan)
    return block.after_mixing(block.add_branch(x, mixed, block.mixer_norm)), new


def serves(model: Any) -> bool:
    """Return whether a ``Decoder`` takes this model, and the default backend lets it."""
    return _misfit(model) is None and default_backend() in ("auto", "cpu")


def _refuse_unfit(model: Any, batch_size: int, max_len: int, weights: Weights | None) -> None:
    """Refuse a model that no plan serves, and settings out of range."""
    for name, given in (("batch_size", batch_size), ("max_len", max_len)):
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise MixerError(f"Decoder: {name} must be an integer >= 1, got {given!r}.")
    if weights not in (None, *get_args(Weights)):
        raise MixerError(f"Decoder: weights={weights!r} is unknown; choose 'bfloat16', 'int8' or None.")
    why = _misfit(model)
    if why is not None:
        raise MixerError(f"Decoder: {why}.")


def _misfit(model: Any) -> str | None:
    """Return why no plan serves the model, and what does; None if one does."""
    if not cpu.available():
        return f"{cpu.why_not()}; model.extend needs no kernels"
    if not model.streams:
        names = ", ".join(sorted({type(b.mixer).__name__ for b in model.blocks if not b.streams}))
        return f"{names} cannot continue from a state; LM.generate reads all tokens again"
    device = next((p.device.type for p in model.parameters()), "cpu")
    if device != "cpu":
        twin = "use export.GraphedDecoder" if device == "cuda" else "call model.extend"
        return f"the model is on {device!r}, and a plan is for the CPU; {twin} there"
    if model.training:
        return "the model is in training mode; call model.eval()"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks, which a plan would leave out; remove them"
    return None


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row to 255 steps between its largest numbers; return the steps and their size."""
    scales = weight.float().abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight.float() / scales[:, None]).round().to(torch.int8), scales


_NARROW: dict[str, Narrow] = {"bfloat16": lambda weight: (weight.to(torch.bfloat16), None), "int8": _to_int8}
_VERSION = attrgetter("_version")
_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
