"""PolyNL (Babiloni et al. 2021, ICCV, arXiv:2107.02859), a relative of Hydra attention."""

from __future__ import annotations

from torch import nn

from ..functional.sums import kernel_attention as sums
from ..mixers.base import About, Arguments, Facts, Inputs, Kernels
from ..mixers.cost import MixingCost
from ..mixers.hydra import as_state, kernel_cost, step
from ..mixers.segments import Segmented


class PolyNL(Segmented):
    """PolyNL: Y = (X * mean_t(X W_1 * X W_2)) W_3, Hydra with the token itself as query and the mean kernel.

    Babiloni et al. 2021, ICCV (arXiv:2107.02859). Maps (B, T, D) to (B, T, D). W_1 is k_proj, W_2 v_proj, W_3 out_proj;
    there is no query projection. The causal form takes the mean over the tokens so far. Time and memory O(T D).
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        about=About("Babiloni et al. 2021, ICCV (arXiv 2107.02859)", "kernel", "T D", "T D"),
        carries=("k_proj", "v_proj", "out_proj"),
        kernels=Kernels(("hydra",), step="hydra"),
        form="hydra",
    )

    def __init__(self, dim: int, *, causal: bool = False, qkv_bias: bool = True, out_bias: bool = True):
        super().__init__(dim, causal=causal)
        self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=qkv_bias) for _ in range(2))
        self.out_proj = nn.Linear(dim, dim, bias=out_bias)

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.hydra`` for this input: (positional, keyword)."""
        keys = inputs.keys
        return (inputs.x, self.k_proj(keys), self.v_proj(keys)), {
            "feature": "mean",
            "causal": self.causal,
            "key_mask": inputs.key_mask,
        }

    def mixing_cost(self, T: int) -> MixingCost:
        return kernel_cost(T, self.dim, self.dim, "mean", q_proj=False)

    def empty_state(self, batch_size, *, device, dtype):
        return as_state(sums.empty_sums(batch_size, self.dim, self.dim, softmax=False, device=device))

    def context_state(self, context, context_mask):
        empty = self.empty_state(context.shape[0], device=context.device, dtype=context.dtype)
        past = sums.absorb(
            empty,
            self.k_proj(context),
            self.v_proj(context),
            context_mask,
            heads=self.dim,
            feature="mean",
            eps=sums.EPS,
        )
        return as_state(past)

    def mix_chunk(self, x, state, *, positions, key_mask):
        options = {"heads": self.dim, "feature": "mean", "normalise": True, "eps": sums.EPS}
        y, state = step(x, self.k_proj(x), self.v_proj(x), state, causal=self.causal, valid=key_mask, options=options)
        return self.out_proj(y), state
