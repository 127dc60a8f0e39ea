"""Linear attention (Katharopoulos et al. 2020, "Transformers are RNNs", arXiv 2006.16236) as a layer."""

from __future__ import annotations

from ..functional import linear as form
from ..functional.layout.checks import check_name
from ..functional.sums import features as sums
from .base import QKVO, About, Arguments, Facts, Inputs, Kernels
from .cost import MixingCost
from .parts.feature_state import KernelState, kernel_cost, over_context
from .parts.shared import add_projections
from .segments import Segmented


class LinearAttention(Segmented):
    """Linear attention: y_t = W_o [phi(q_t) . sum_s phi(k_s) v_s / phi(q_t) . sum_s phi(k_s)] in each head.

    Katharopoulos et al. 2020, arXiv:2006.16236, Eqs. 4 to 6. Maps (B, T, D) to (B, T, D).

    Args:
        heads: number of heads, 8 by default; must divide dim. Each has its own sums of e x e numbers, e = dim / heads.
        feature: phi, never negative: "elu" (elu + 1, default, the paper's), "relu", "squared_relu", "exp", or "softmax"
            over the features.

    Parameters: q_proj, k_proj, v_proj, out_proj. Time O(T e D). The streaming state is heads x e x (e + 2) numbers,
    whatever T.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        causal=True,
        streaming=True,
        context=True,
        form="linear_attention",
        about=About(
            "Katharopoulos et al. 2020, arXiv 2006.16236",
            "kernel",
            "T e D",
            "T D",
            idea="a positive kernel in place of the softmax, elu + 1 and others",
            tier="core",
        ),
        carries=QKVO,
        kernels=Kernels(("linear",), step="linear"),
        only_qkv=True,
    )

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = False,
        heads: int = 8,
        feature: str = "elu",
        qkv_bias: bool = True,
        out_bias: bool = True,
    ):
        super().__init__(dim, causal=causal)
        check_name(type(self).__name__, "feature", feature, form.LOG_FEATURES)
        self.feature = feature
        add_projections(self, heads=heads, qkv_bias=qkv_bias, out_bias=out_bias)
        self.heads = heads

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``functional.linear_attention`` for this input: (positional, keyword)."""
        keys = inputs.keys
        args = self.q_proj(inputs.x), self.k_proj(keys), self.v_proj(keys)
        return args, {"heads": self.heads, "feature": self.feature, "causal": self.causal, "key_mask": inputs.key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        return kernel_cost(T, self.dim, self.heads, self.dim // self.heads, drawn=False)

    def empty_state(self, batch_size, *, device, dtype):
        e = self.dim // self.heads
        return KernelState(*sums.empty_features(batch_size, self.heads, e, e, device=device))

    def context_state(self, context, context_mask):
        k, v = self.k_proj(context), self.v_proj(context)
        return KernelState(*form.linear_sums(k, v, heads=self.heads, feature=self.feature, key_mask=context_mask))

    def mix_chunk(self, x, state, *, positions, key_mask):
        q = self.q_proj(x)
        if not self.causal:
            return self.out_proj(over_context(q, form.log_queries(q, self.heads, self.feature), state)), state
        options = {"heads": self.heads, "feature": self.feature, "key_mask": key_mask}
        y, past = form.linear_chunk(q, self.k_proj(x), self.v_proj(x), state, **options)
        return self.out_proj(y), KernelState(*past)
