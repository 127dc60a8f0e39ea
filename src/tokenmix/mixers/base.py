"""The base class of all mixers: it checks the inputs, then calls the mixer's own ``mix`` or ``mix_chunk``.

Shapes: B batch, T queries, S keys, L chunk length, D features. Masks are boolean; True means may be attended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..kernels.recompute import remembers_settings
from ..system.properties import named_errors
from .cost import Cost, MixingCost, projection_flops
from .entries import Entry, called_with_hooks
from .entries import Inputs as Inputs
from .facts import QKVO as QKVO
from .facts import About as About
from .facts import Facts as Facts
from .facts import Kernels as Kernels
from .input_checks import InputChecks
from .option_checks import Checked
from .state import Halo, Segment
from .state import State as State
from .state import chunk_positions as chunk_positions
from .state import register_state as register_state
from .state import token_positions as token_positions
from .state_checks import Kinds, checked_state, working_dtype

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a functional form as ``functional_args`` returns them: (positional, keyword)."""
_tracing = torch._C._get_tracing_state
Result = TypeVar("Result")
SHORT = 6  # packed sequences of up to 2 ** SHORT tokens are padded together


@dataclass(frozen=True)
class Capabilities:
    """The features that one mixer instance supports; the contract suite proves each field both ways."""

    causal: bool
    streaming: bool
    context: bool
    attn_mask: bool
    grid: bool
    export: bool
    keeps_context: bool = False
    """Whether ``init_state(context=...)`` projects a context, or the sums over it, once for all later queries."""
    segments: bool = False
    key_blocks: bool = False
    """Whether keys can be read in blocks whose sums merge, as in ring attention."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "keeps_context", self.keeps_context and self.context)
        object.__setattr__(self, "segments", self.segments and self.streaming)
        object.__setattr__(self, "key_blocks", self.key_blocks and self.causal)


@named_errors
class Mixer(InputChecks, metaclass=Checked):
    """A token mixer: it maps (B, T, D) to (B, T, D), in the place of multi-head attention.

    Args:
        dim: number of features D.
        causal: query t attends keys 0..t only. Fixed at construction, because shapes of states and biases depend on it.
        max_len: the longest sequence in tokens, for mixers with parameters per position; otherwise None.

    Subclasses add keyword-only options. ``qkv_bias`` and ``out_bias`` say whether the input projections and
    ``out_proj`` have biases; both are True by default.

    Raises:
        MixerError: on any input or option that the mixer does not support; the message names what works.
    """

    # conventional names; a mixer may lack some of them
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    out_proj: nn.Module

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        for name in ("mix", "functional_args"):
            own = cls.__dict__.get(name)
            if own is not None and getattr(getattr(own, "__code__", None), "co_argcount", 2) > 2:
                raise MixerError(
                    f"{cls.__name__}: {name} takes (self, inputs), one Inputs instead of x, context and masks; "
                    "inputs.x and inputs.keys are x and the context."
                )
        for each in cls.__mro__:  # the parts that it shares with others too
            if issubclass(each, Mixer) or each.__module__.startswith(__package__):
                named_errors(each)

    def __init__(self, dim: int, *, causal: bool = False, max_len: int | None = None):
        super().__init__()
        self.dim, self.causal, self.max_len = dim, causal, max_len
        self.max_context_len: int | None = max_len
        self.state_kinds = Kinds()
        if dim < 1:
            self.refuse(f"dim must be a positive integer, got {dim!r}")
        if max_len is not None and max_len < 1:
            self.refuse(f"max_len must be a positive integer, got {max_len!r}")
        if causal and not self.facts.causal:
            self.refuse("has no causal form; build it with causal=False")
        if self.facts.causal_only and not causal:
            self.refuse(
                "has only a causal form; build it with causal=True, or take a mixer whose tokens see both sides"
            )

    @property
    def capabilities(self) -> Capabilities:
        """Return the features of this instance: those of its class, narrowed by its options."""
        facts = self.facts
        can = Capabilities(
            causal=self.causal,
            streaming=facts.streaming and self.causal,
            context=facts.context and not self.causal,
            attn_mask=facts.attn_mask,
            grid=facts.grid,
            export=facts.export,
            keeps_context=facts.streaming,
            segments=facts.segments,
            key_blocks=facts.key_blocks,
        )
        return self.narrow_capabilities(can)

    def narrow_capabilities(self, can: Capabilities) -> Capabilities:
        """Return the features that are left with the options of this instance.

        Mixers some of whose options exclude a feature override this, with ``dataclasses.replace(can, ...)``.
        """
        return can

    def cost(self, T: int, batch: int = 1) -> Cost:
        """Compute the cost of one forward pass over (batch, T, dim).

        Returns:
            FLOPs, parameters, bytes kept for the backward pass, and bytes of the streaming state after T tokens.
        """
        if not isinstance(T, int) or T < 1 or not isinstance(batch, int) or batch < 1:
            self.refuse(f"cost expects T and batch as positive integers, got T={T!r}, batch={batch!r}")
        if (self.max_len or T) < T:
            self.refuse(f"was built with max_len={self.max_len}, cost was asked for T={T}")
        mixing, each = self.mixing_cost(T), sum(p.numel() for p in self.parameters())
        state = mixing.state if self.capabilities.streaming else 0
        projections = projection_flops(self, T) if mixing.projections is None else mixing.projections
        return Cost(batch * projections, batch * mixing.flops, each, batch * mixing.activations, batch * state)

    def mixing_cost(self, T: int) -> MixingCost:
        """Compute the cost per row of mixing T tokens, without the projections.

        Mixers with a cost formula override this.
        """
        self.refuse("declares no cost; write mixing_cost(T)")

    @staticmethod
    def largest_logit(args: tuple, options: dict[str, Any]) -> float:
        """Return the largest |logit| for these arguments of the functional form, where logits are dot products.

        Their rounding limits the accuracy of float32; 0 means that there is no such limit.
        """
        return 0.0

    def waived(self) -> dict[str, str]:
        """Return the promises that this instance cannot keep, with reasons: its class's, narrowed by its options."""
        return dict(self.facts.waivers)

    def options_of_length(self) -> dict[str, Any]:
        """Return the options that ``max_len`` determined, because they were not given, and that ``resize`` keeps."""
        return {}

    def refuse(self, why: str) -> NoReturn:
        """Raise ``MixerError`` in the name of this mixer."""
        raise MixerError(f"{type(self).__name__}: {why}.")

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse ``torch.jit.script``, which would stop somewhere in the mixer."""
        self.refuse("cannot be scripted; torch.jit.trace and torch.export take it")

    def reset_parameters(self) -> None:
        """Initialise all parameters again, drawing random numbers in the same order as construction does."""
        for child in self.children():
            child.reset_parameters()  # type: ignore[operator]  # every child of a mixer is a Linear or one of ours
        self.init_parameters()

    def init_parameters(self) -> None:
        """Initialise the parameters that the mixer itself owns.

        ``__init__`` and ``reset_parameters`` call this last.
        """

    def start_copies(self) -> None:
        """Copy the initial values of those parameters that start as copies of others.

        Code that re-initialises the originals, as a model does, must call this afterwards.
        """

    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
    ) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, *, positions: Tensor | None = None, key_mask: Tensor | None = None, entry: Entry[Result]
    ) -> Result: ...

    @remembers_settings
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        key_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        grid: tuple[int, ...] | None = None,
        prefix: int = 0,
        entry: Entry[Any] | None = None,
    ) -> Any:
        """Mix x (B, T, D) with itself or with ``context`` (B, S, D).

        Args:
            positions: (B, T) integers, the position of each token of x. Default: the token's index minus the index of
                the first True of the row's key mask; over a context, whose mask belongs to the context, the index.
            key_mask: (B, S) bool, True = this key may be attended.
            attn_mask: (T, S) or (B, T, S) bool, for mixers that weight pairs of tokens; all masks are ANDed.
            grid: (H, W) or (D, H, W), the size of the grid that the tokens after the first ``prefix`` ones form, for
                mixers on grids.
            prefix: number of leading tokens outside of the grid, such as a class token and registers.
            entry: for internal use: ``extend``, ``segment`` and ``init_state`` call ``forward`` with it where module
                hooks wait for their calls too; the result is then theirs.

        Returns:
            (B, T, D). A valid query with nothing to attend gives ``out_proj(0)``; outputs at masked positions are
            finite for finite inputs, and otherwise unspecified.

        Raises:
            MixerError: if an input has a wrong shape, dtype, device or value, or needs a feature that this mixer lacks.
        """
        if entry is not None:
            return entry.run(x, entry.past, positions, key_mask)
        self._check_devices(x)
        self._check_input(x, "x")
        self._check_context(x, context)
        self._check_masks(x, x if context is None else context, key_mask, attn_mask)
        self._check_grid(x, positions, grid, prefix)
        self._check_positions(x, positions)
        if grid is not None and positions is not None:
            self.check_range(positions, prefix + prod(grid), f"was given grid={tuple(grid)} and prefix={prefix}")
        if _tracing() is not None:
            x, context, grid = self._hold_lengths(x, context, grid)
        return self.mix(Inputs(x, context, positions, key_mask, attn_mask, grid, prefix))

    def forward_packed(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Mix sequences that are stored one after the other.

        Sequences of similar lengths are padded to the longest of them and mixed together, which at most doubles the
        number of tokens. The number of calls depends on the lengths, so this supports neither export nor
        ``fullgraph=True``.

        Args:
            x: (N, D), all tokens. Positions restart at 0 in each sequence.
            cu_seqlens: (n + 1,) int32, cumulative lengths, rising from 0 to N.

        Returns:
            (N, D).
        """
        lengths = self._check_packed(x, cu_seqlens)
        if x.shape[0] == 0:
            return self(x[None])[0]
        mixed, indices = zip(
            *(self._mix_group(x, cu_seqlens[which], lengths[which]) for which in _length_groups(lengths)), strict=True
        )
        return torch.cat(mixed)[torch.cat(indices).argsort()]

    def _mix_group(self, x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the packed sequences with these starts and lengths; return the outputs and the tokens' indices in x."""
        steps = torch.arange(int(lengths.max()), device=x.device)
        mask = steps < lengths[:, None]
        indices = (starts[:, None] + steps)[mask]
        padded = x.new_zeros(*mask.shape, self.dim)
        padded[mask] = x[indices]
        return self(padded, key_mask=None if bool(mask.all()) else mask)[mask], indices

    def init_state(
        self,
        batch_size: int,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> State:
        """Return the state before the first token, or the state over a whole ``context``.

        The state over a context holds its projected keys and values, or their sums.

        Args:
            batch_size: number of rows B.
            context: (B, S, D), for mixers built with ``causal=False``.
            context_mask: (B, S) bool, True = this token of the context may be attended.
            device: of the state; default: that of the parameters.
            dtype: of keys and values in the state; default: that of the parameters.

        Raises:
            MixerError: if the mixer does not stream in this form.
        """
        if not self.facts.streaming:
            self.refuse("has no streaming form; call forward on the whole sequence")
        if context is None:
            if not self.causal:
                self.refuse(
                    "was built with causal=False; only causal mixers stream, or any mixer over a context given here"
                )
            if device is None:
                weight = next(self.parameters(), next(self.buffers(), None))
                device = None if weight is None else weight.device
            return self.empty_state(
                batch_size, device=device, dtype=dtype or working_dtype(self) or torch.get_default_dtype()
            )
        if context.ndim == 3 and context.shape[0] != batch_size:
            self.refuse(f"expects a context of {batch_size} rows, got shape {tuple(context.shape)}")
        return self._enter(Entry(self._read_context, None), context, None, context_mask)

    def extend(
        self, x: Tensor, state: State, *, positions: Tensor | None = None, key_mask: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Mix the next L >= 1 tokens x (B, L, D) with all tokens before them.

        Args:
            state: from ``init_state`` or an earlier ``extend``. It is not modified. Its floating point tensors may have
                another floating point dtype and are then converted.
            positions: (B, L) integers; they replace the running position for this chunk, and later chunks count on from
                them.
            key_mask: (B, L) bool, False marks padding in this chunk.

        Returns:
            The outputs (B, L, D) and the new state.

        Raises:
            MixerError: if the state belongs to another mixer, or if an input is not supported.
        """
        if state is None:
            self.refuse("extend needs a state; start with init_state")
        if called_with_hooks(self):
            seen: tuple[Tensor, State] = self(
                x, positions=positions, key_mask=key_mask, entry=Entry(self._extend, state)
            )
            return seen
        return self._extend(x, state, positions, key_mask)

    def segment(
        self, x: Tensor, *, positions: Tensor | None = None, key_mask: Tensor | None = None, halo: Halo | None = None
    ) -> Segment:
        """Return the segment of x (B, L, D), L >= 0: its effect on any earlier state.

        For any cut, ``segment(x ++ y)`` is ``segment(x).then(segment(y))``, and ``segment(x).after(state)`` is
        ``extend(x, state)[1]``: equal as states, whose scales may differ.

        Args:
            positions, key_mask: as in ``extend``. Positions that are not given need not be known: they are counted on
                from what comes before.
            halo: the last tokens before the stretch, for a mixer whose sums are of convolved tokens (``aft_forget``);
                None: there are none. Other mixers do not read it.

        Raises:
            MixerError: if the mixer has no segments.
        """
        self.refuse(
            "has no segments here; causal mixers whose state is a sum or a window have them, such as aft_simple, "
            "hydra, linear and aft_local"
        )

    def _enter(self, entry: Entry[Result], x: Tensor, positions: Tensor | None, key_mask: Tensor | None) -> Result:
        """Run an entry; through ``forward`` where anything but this class would see or change the call."""
        if called_with_hooks(self):
            result: Result = self(x, positions=positions, key_mask=key_mask, entry=entry)
            return result
        return entry.run(x, entry.past, positions, key_mask)

    @remembers_settings
    def _extend(
        self, x: Tensor, state: State, positions: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Check the inputs of ``extend`` and mix the chunk."""
        self._check_chunk(x, positions, key_mask)
        if not self.causal and not self.facts.context:
            self.refuse("was built with causal=False and does not stream; build it with causal=True")
        if _tracing() is not None:
            x = self._hold_chunk(x)
        if not torch.compiler.is_compiling():
            state = checked_state(self, x, state)
        if not self.causal and key_mask is not None:
            self.refuse("takes no key_mask when it streams over a context; pass context_mask to init_state")
        return self.mix_chunk(x, state, positions=positions, key_mask=key_mask)

    @remembers_settings
    def _read_context(
        self, context: Tensor, past: None, positions: Tensor | None, context_mask: Tensor | None
    ) -> State:
        """Check the context of ``init_state`` and return its state."""
        self._check_devices(context)
        self._check_input(context, "context")
        self._check_context(context, context)
        self._check_masks(context, context, context_mask, None)
        return self.context_state(context, context_mask)

    if TYPE_CHECKING:  # a mixer without a functional form has no such method

        def functional_args(self, inputs: Inputs) -> Arguments:
            """Return the arguments of the functional form for this input, projected: (positional, keyword).

            Every mixer implements this, or ``mix`` itself.
            """
            raise NotImplementedError

    def mix(self, inputs: Inputs) -> Tensor:
        """Compute the outputs (B, T, D): the functional form of this input, projected by ``out_proj``.

        Mixers whose outputs are anything else override this. The inputs have been checked.
        """
        form = self.facts.functional_form()
        if form is None or not hasattr(self, "functional_args"):
            self.refuse("implements neither mix nor functional_args with the name of a form; it needs one of them")
        args, options = self.functional_args(inputs)
        return self.out_proj(form(*args, **options))

    def mix_chunk(
        self, x: Tensor, state: State, *, positions: Tensor | None, key_mask: Tensor | None
    ) -> tuple[Tensor, State]:
        """Compute the outputs (B, L, D) of a chunk and the new state. Every mixer that streams implements this.

        The inputs have been checked.
        """
        raise NotImplementedError

    def empty_state(self, batch_size: int, *, device: Any, dtype: torch.dtype) -> State:
        """Return the state before the first token; with ``causal=False``, the state over a context without tokens."""
        raise NotImplementedError

    def state_lengths(self) -> dict[str, str]:
        """Name the state fields whose length along axis 1 does not simply follow the number of tokens.

        Returns:
            Field name -> the quantity that its length follows; "" for a fixed length. Needed for growing fields that do
            not start empty or do not grow with the tokens.
        """
        return {}

    def context_state(self, context: Tensor, context_mask: Tensor | None) -> State:
        """Return the state of a mixer whose keys and values all come from ``context``."""
        self.refuse("has no streaming form over a context; call forward(x, context)")


def _length_groups(lengths: Tensor) -> Iterator[Tensor]:
    """Yield the indices of non-empty sequences of similar lengths, grouped by the next power of two."""
    groups = [max((n - 1).bit_length(), SHORT) if n else -1 for n in lengths.tolist()]
    sizes = torch.tensor(groups, dtype=torch.int64, device="cpu")
    for size in sizes[sizes >= 0].unique():
        yield (sizes == size).nonzero()[:, 0].to(lengths.device)
