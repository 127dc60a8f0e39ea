"""What the models of symbols share: embedding, positions, blocks, norm and head.

They read whole sequences, causal ones also chunks, and may apply their blocks several times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..mixers import State
from ..mixers.parts.weights_on_call import ReadEmbedding
from ..positions.added import build_added_positions, check_added_positions
from ..system.properties import named_errors
from ..types import Options, Spec
from .blocks import Block
from .layers import MLPKind, NormType, build_norm, cap_logits, check_layer_kinds
from .looped import Loop, LoopConfig
from .model import Model


class TrunkConfig(Protocol):
    """The fields of a config that a trunk reads; ``LMConfig`` describes them."""

    @property
    def dim(self) -> int: ...
    @property
    def mixers(self) -> tuple[Spec, ...]: ...
    @property
    def layers(self) -> int | None: ...
    @property
    def mlp_ratio(self) -> float: ...
    @property
    def norm(self) -> str: ...
    @property
    def norm_type(self) -> NormType: ...
    @property
    def mlp(self) -> MLPKind: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def logit_cap(self) -> float | None: ...
    @property
    def positions(self) -> str | Options | None: ...
    @property
    def tied(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def init_std(self) -> float: ...
    @property
    def max_len(self) -> int: ...
    def specs(self) -> list[Spec]: ...


def check_trunk(config: TrunkConfig, *positive: str) -> None:
    """Refuse a config from which no trunk can be built.

    The fields named in ``positive`` must be at least 1.
    """
    name = type(config).__name__
    for field in positive:
        if getattr(config, field) < 1:
            raise MixerError(f"{name}: {field} must be positive, got {getattr(config, field)}.")
    if not config.mixers:
        raise MixerError(f"{name}: mixers is empty; give at least one spec.")
    if config.layers is not None and config.layers < len(config.mixers):
        raise MixerError(
            f"{name}: layers={config.layers} is less than the number of mixers given, {len(config.mixers)}."
        )
    check_added_positions(config.positions, name)
    check_layer_kinds(name, config.norm_type, config.mlp)
    if config.logit_cap is not None and not 0 < config.logit_cap < inf:
        raise MixerError(f"{name}: logit_cap must be a positive number or null, got {config.logit_cap}.")
    if not 0 <= config.dropout < 1:
        raise MixerError(f"{name}: dropout must be in [0, 1), got {config.dropout}.")


def build_blocks(
    config: TrunkConfig, specs: list[Spec], *, causal: bool, cross: list[Spec] | None = None
) -> nn.ModuleList:
    """Build one block for each spec, with ``cross`` a mixer over a context in each."""
    options: Options = {
        "causal": causal,
        "max_len": config.max_len,
        "mlp_ratio": config.mlp_ratio,
        "mlp": config.mlp,
        "mlp_bias": config.mlp_bias,
        "norm": config.norm,
        "norm_type": config.norm_type,
        "dropout": config.dropout,
    }
    across: Sequence[Spec | None] = [None] * len(specs) if cross is None else cross
    return nn.ModuleList(
        Block(config.dim, spec, cross=other, **options) for spec, other in zip(specs, across, strict=True)
    )


def shortest(*limits: int | None) -> int | None:
    """Return the least of the limits that there are; None if there is none."""
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None  # torch.compile takes no min with a default


@named_errors
class Trunk(Model):
    """A stack of blocks between an embedding and a head over the same symbols.

    A model built on it determines what is embedded and what is predicted.

    Args:
        config: sizes, mixers and initialisation.
        vocab: number of symbols V.
        loop: how often the blocks are applied; None: once.
        causal: whether a symbol sees only those before it.
        cross: one mixer spec per layer for reading a context; None: there is none.
    """

    reads_shares = False  # whether ``forward`` may read one rank's part of a sequence, see tokenmix.parallel

    def __init__(
        self,
        config: TrunkConfig,
        *,
        vocab: int,
        loop: LoopConfig | None = None,
        causal: bool = True,
        cross: list[Spec] | None = None,
    ):
        super().__init__()
        self.init_std, self.vocab, self.logit_cap = config.init_std, vocab, config.logit_cap
        # The children draw while being built. Only reset_parameters below may count, or a meta build would differ.
        with torch.random.fork_rng():
            self.embed = ReadEmbedding(vocab, config.dim)
            self.positions: Any = build_added_positions(
                config.positions, config.dim, config.max_len, type(config).__name__
            )
            self.blocks: Any = build_blocks(config, config.specs(), causal=causal, cross=cross)
            self.norm = build_norm(config.norm_type, config.dim, 1e-5) if config.norm == "pre" else nn.Identity()
            self.head = nn.Linear(config.dim, vocab, bias=False) if not config.tied else None
            self.dropout = nn.Dropout(config.dropout)
            self.loop = None if loop is None else Loop(loop, config.dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Re-initialise every parameter from torch's generator."""
        std = self.init_std
        nn.init.normal_(self.embed.weight, std=std)
        if hasattr(self.positions, "reset_parameters"):
            self.positions.reset_parameters()
        for block in self.blocks:
            block.reset_parameters(std, std / (2 * len(self.blocks) * self.times) ** 0.5)
        if self.loop is not None:
            self.loop.reset_parameters(std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        if not isinstance(self.norm, nn.Identity):
            self.norm.reset_parameters()

    @property
    def times(self) -> int:
        """Return how often the blocks are applied."""
        return 1 if self.loop is None else self.loop.times

    def read(self, x: Tensor, **given: Tensor | None) -> Tensor:
        """Map embedded symbols x (B, T, D), with positions added, to logits (B, T, V).

        In a causal trunk row t depends on x[0..t]. ``given`` goes to the blocks: key_mask and positions (B, T) for the
        mixers, context and context_mask for those across.
        """
        return self.logits(self.features(x, **given))

    def features(self, x: Tensor, **given: Tensor | None) -> Tensor:
        """Map embedded symbols x (B, T, D) to the normalised input of the head (B, T, D); see ``read``."""
        x = self.dropout(x)
        if self.loop is None:
            for block in self.blocks:
                x = block(x, **given)
            return self.norm(x)
        (without, times), s = self.loop.passes(), self.loop.begin(x)
        for i in range(without + times):
            with torch.set_grad_enabled(torch.is_grad_enabled() and i >= without):
                for n, block in enumerate(self.blocks):
                    s = block(self.loop.inject(s, x, n), **given)
        return self.norm(s)

    def read_chunk(
        self, x: Tensor, layers: tuple[State, ...], **given: Tensor | None
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Do the same as ``read`` for the next L embedded symbols (B, L, D), continuing from the mixers' states.

        Returns logits and new states.
        """
        if len(layers) != len(self.blocks) * self.times:
            raise MixerError(
                f"{type(self).__name__}: this model has {len(self.blocks)} blocks applied {self.times} times, but the "
                + f"state is that of {len(layers)}; begin with init_state()."
            )
        x, states = self.dropout(x), []
        s = x if self.loop is None else self.loop.begin(x)
        for i, old in enumerate(layers):
            n = i % len(self.blocks)
            s, new = self.blocks[n].extend(s if self.loop is None else self.loop.inject(s, x, n), old, **given)
            states.append(new)
        return self.logits(self.norm(s)), tuple(states)

    def empty_states(
        self, batch_size: int, device: torch.device | None = None, **context: Tensor | None
    ) -> tuple[tuple[State, ...], Tensor]:
        """Return the mixers' states before the first symbol and the position of each row, 0.

        There is one for each application of a block.

        Args:
            device: device of both; None: that of the weights.
            context: context (B, S, D) and context_mask (B, S), for blocks that read one.
        """
        start = torch.zeros(batch_size, dtype=torch.long, device=self.embed.weight.device if device is None else device)
        blocks = [block for _ in range(self.times) for block in self.blocks]
        return tuple(block.init_state(batch_size, device=device, **context) for block in blocks), start

    @property
    def streams(self) -> bool:
        """Return whether every mixer has a streaming form; one that is not causal is for ``init_state`` to refuse."""
        return all(block.streams or not block.mixer.causal for block in self.blocks)

    @property
    def max_len(self) -> int | None:
        """Return the longest sequence this model accepts (an encoder-decoder: target); None if it has no longest."""
        return shortest(self.mixers_max_len(), self.longest_added())

    def longest_added(self) -> int | None:
        """Return the length of the added position encoding; None if it has no limit."""
        return getattr(self.positions, "max_len", None)

    def mixers_max_len(self) -> int | None:
        """Return the shortest length that a mixer was built with; None if none has a length."""
        return shortest(*(block.mixer.max_len for block in self.blocks))

    def embed_at(self, tokens: Tensor, at: Tensor) -> Tensor:
        """Return the embedded symbols (B, T, D) of tokens (B, T) at the positions ``at`` (B, T), added to them."""
        x = self.embed(tokens.long())
        return x if self.positions is None else x + self.positions(at).to(x.dtype)

    def packed_positions(self, tokens: Tensor, starts: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the positions (B, T) of tokens in their sequences, and the cumulative lengths of all sequences.

        Args:
            starts: (B, T) bool, True where a sequence begins; one begins with each row in any case.

        Raises:
            MixerError: for another shape or dtype, and beside a key mask: what is padding is a sequence of its own.
        """
        if starts.shape != tokens.shape or starts.dtype != torch.bool:
            raise MixerError(
                f"{type(self).__name__}: starts must be bool of the tokens' shape {tuple(tokens.shape)}, got "
                + f"{starts.dtype} {tuple(starts.shape)}."
            )
        if key_mask is not None:
            raise MixerError(f"{type(self).__name__}: give key_mask or starts, not both; padding may start on its own.")
        starts = starts.clone()
        starts[:, :1] = True
        index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        begins = starts.flatten().nonzero()[:, 0]
        ends = torch.cat([begins, begins.new_tensor([tokens.numel()])])
        return index - torch.where(starts, index, 0).cummax(1).values, ends.int()

    def check_symbols(self, tokens: Tensor) -> None:
        """Raise an error unless ``symbols`` are a batch of integers in 0..V-1.

        Values are read only on the CPU and outside of compilation.
        """
        name = type(self).__name__
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise MixerError(
                f"{name}: expects integer tokens of shape (batch, time), got {tokens.dtype} {tuple(tokens.shape)}."
            )
        if (
            tokens.device.type == "cpu"
            and tokens.numel()
            and not torch.compiler.is_compiling()
            and not torch.compiler.is_exporting()
        ):
            low, high = (int(n) for n in tokens.aminmax())
            if low < 0 or high >= self.vocab:
                raise MixerError(f"{name}: tokens must be in 0..{self.vocab - 1}, got {low} to {high}.")

    def logits(self, x: Tensor) -> Tensor:
        """Map the output of ``features`` (B, T, D) to logits (B, T, V)."""
        logits = self.head(x) if self.head is not None else F.linear(x, *self.embed())
        return cap_logits(logits, self.logit_cap)
