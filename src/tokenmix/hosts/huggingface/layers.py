"""Use our transformer block as a layer of transformers: its state in the cache, a second mixer over the encoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from ...errors import MixerError
from ...kernels.recompute import remembers_settings
from ...kernels.tokenwise import silu_gate
from ...mixers import Mixer
from ...models import MLP, Block
from ...types import Options
from .cache import TokenMixStateLayer
from .configuration import TokenMixConfig, mlp_ratio
from .initialization import mark_self_initialized
from .masks import ChunkPositions


class TokenMixMLP(MLP):
    """Compute W_2 act(W_1 x), or W_2 (act(W_g x) * W_1 x), with any activation that transformers knows by name."""

    def __init__(self, config: TokenMixConfig):
        super().__init__(config.hidden_size, mlp_ratio(config), bias=config.mlp_bias)
        if config.hidden_act not in ACT2FN:
            unknown = f"hidden_act={config.hidden_act!r} is not an activation of transformers"
            raise MixerError(f"TokenMixConfig: {unknown}, such as 'gelu', 'silu' and 'relu'.")
        self.act, self.silu = ACT2FN[config.hidden_act], config.hidden_act in ("silu", "swish")
        width = self.up.out_features
        self.gate = nn.Linear(config.hidden_size, width, bias=config.mlp_bias) if config.gated_mlp else None

    @remembers_settings
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.gate is None:
            return self.down(self.act(h))
        gate = self.gate(x)
        return self.down(silu_gate(gate, h) if self.silu else self.act(gate) * h)


class TokenMixLayer(GradientCheckpointingLayer, Block):
    """One ``Block``: mixer, with ``cross_mixers`` one over the encoder's output, MLP; each with norm and residual."""

    def __init__(self, config: TokenMixConfig, index: int):
        rate = config.drop_path_rate * index / max(config.num_hidden_layers - 1, 1)
        options: Options = {
            "norm": config.norm,
            "norm_type": config.norm_type,
            "norm_eps": config.layer_norm_eps,
            "dropout": config.hidden_dropout_prob,
            "drop_path": rate,
        }
        options |= {
            "causal": bool(config.is_causal),
            "max_len": config.max_position_embeddings,
            "mlp_ratio": mlp_ratio(config),
            "cross": None if config.cross_mixers is None else config.specs("cross_mixers")[index],
        }
        super().__init__(config.hidden_size, config.specs()[index], **options)
        self.mlp = TokenMixMLP(config)
        mark_self_initialized(self)

    def forward(  # type: ignore[override]  # transformers' layers take positional arguments
        self,
        hidden_states: Tensor,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        *,
        past_key_values: tuple[TokenMixStateLayer, ...] | None = None,
        chunk: ChunkPositions | None = None,
        cross_positions: Tensor | None = None,
    ) -> Tensor:
        """Map (B, L, D) to (B, L, D).

        ``past_key_values`` holds this layer's state and that of its cross mixer, which are continued and updated.
        """
        x, kept = hidden_states, past_key_values or (None, None)
        x = self.add_branch(
            x,
            self._mix_self(self.branch_input(x, self.mixer_norm), kept[0], **self._mixer_inputs(chunk)),
            self.mixer_norm,
        )
        if self.cross is not None and context is not None:
            crossed = self._mix_cross(
                self.cross, self.branch_input(x, self.cross_norm), context, context_mask, kept[1], cross_positions
            )
            x = self.add_branch(x, crossed, self.cross_norm)
        return self.after_mixing(x)

    def _mixer_inputs(self, chunk: ChunkPositions | None) -> dict[str, Tensor | None]:
        """Return mask and positions as this layer's mixer takes them."""
        if chunk is None:
            return {}
        turns = getattr(self.mixer, "positions", None) is not None
        return {"key_mask": chunk.key_mask, "positions": chunk.positions if turns else chunk.counted}

    def _mix_self(self, x: Tensor, kept: TokenMixStateLayer | None, **given: Tensor | None) -> Tensor:
        if kept is None:
            return self.mixer(x, **given)
        state = (
            kept.state if kept.state is not None else self.mixer.init_state(x.shape[0], device=x.device, dtype=x.dtype)
        )
        y, new = self.mixer.extend(x, state, **given)
        kept.store(
            new,
            x.shape[1],
            lambda n: self.mixer.extend(x[:, :n], state, **{k: a if a is None else a[:, :n] for k, a in given.items()})[
                1
            ],
        )
        return y

    @staticmethod
    def _mix_cross(
        cross: Mixer,
        x: Tensor,
        context: Tensor,
        mask: Tensor | None,
        kept: TokenMixStateLayer | None,
        positions: Tensor | None,
    ) -> Tensor:
        if kept is None:
            return cross(x, context, key_mask=mask, positions=positions)
        state = (
            kept.state if kept.state is not None else cross.init_state(x.shape[0], context=context, context_mask=mask)
        )
        y, state = cross.extend(x, state, positions=positions)
        kept.store(state, x.shape[1])
        return y


class TokenMixImageLayer(GradientCheckpointingLayer, Block):
    """One ``Block`` of a Vision Transformer."""

    def forward(self, x: Tensor, **given: Any) -> Tensor:  # type: ignore[override]  # images have no context
        return Block.forward(self, x, **given)
