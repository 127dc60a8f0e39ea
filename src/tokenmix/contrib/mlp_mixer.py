"""Token mixing of the MLP-Mixer (Tolstikhin et al. 2021, arXiv:2105.01601).

A two-layer perceptron across tokens, shared by channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.sums.nonfinite import guard_nonfinite
from ..functional.sums.taps import zero_masked_values
from ..kernels.backend import Backend, choose
from ..kernels.precision import exact
from ..mixers.base import About, Arguments, Facts, Inputs, Mixer, token_positions
from ..mixers.cost import MixingCost
from ..mixers.parts.options import at_least
from ..positions.grid import replacing_parameter
from .parts.unprojected import Unprojected


@exact
@guard_nonfinite("x")
def mlp_mixer(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Compute Y = W2 gelu(W1 X + b1) + b2 in every channel (Tolstikhin et al. 2021, Eq. 1).

    The norm and the residual of the block are not included.

    Args:
        x: (B, T, D).
        w1: (F, T) or (B, F, T); column s reads token s. b1: (F,).
        w2: (T, F) or (B, T, F); row t makes token t. b2: (T,) or (B, T).

    Returns:
        (B, T, D); a row without any valid token is exactly 0. Time O(T F D). There is no causal form: each hidden unit
        reads every token.
    """
    choose("mlp_mixer", backend, x)
    if causal:
        raise MixerError(
            "mlp_mixer: there is no causal form, because every hidden unit reads every token; use causal=False."
        )
    v = zero_masked_values(x, key_mask)
    w1, b1, w2, b2 = (a.to(v.dtype) for a in (w1, b1, w2, b2))
    y = w2 @ F.gelu(w1 @ v + b1[:, None]) + b2[..., None]
    if key_mask is not None:
        y = torch.where(key_mask.any(1)[:, None, None], y, 0.0)
    return y.to(x.dtype)


class MLPMixer(Mixer):
    """MLP-Mixer: Y = W2 gelu(W1 X + b1) + b2 across tokens, the same for every channel.

    Tolstikhin et al. 2021, arXiv:2105.01601, Eq. 1. Maps (B, T, D) to (B, T, D).

    Args:
        max_len: N, the longest sequence in tokens; column s of W1 and row t of W2 belong to positions s and t.
        hidden: F, the width of the perceptron across tokens, 256 by default.

    As in the paper there are no projections; norm and residual belong to the block. Missing and masked tokens count as
    0. There is no causal form: each hidden unit reads every token, and each output reads every hidden unit.

    Parameters: w1 (F, N), b1 (F), w2 (N, F), b2 (N). Time O(T F D).

    Raises:
        MixerError: if an option is out of its range, if ``causal=True``, or if a sequence is longer than ``max_len``.
    """

    facts = Facts(
        about=About("Tolstikhin et al. 2021, arXiv 2105.01601", "MLP", "T F D", "T D + F D"),
        knows_positions=True,
        form=mlp_mixer,
        waivers={
            "accurate_on_adversarial_keys": "signed sums cancel; "
            "float32 errors scale with their terms (test_mlp_mixer.py)"
        },
    )

    def __init__(self, dim: int, *, max_len: int, causal: bool = False, hidden: int = 256):
        super().__init__(dim, causal=causal, max_len=max_len)
        at_least(self, 1, max_len=max_len, hidden=hidden)
        self.hidden = hidden
        self.w1, self.b1 = nn.Parameter(torch.empty(hidden, max_len)), nn.Parameter(torch.empty(hidden))
        self.w2, self.b2 = nn.Parameter(torch.empty(max_len, hidden)), nn.Parameter(torch.empty(max_len))
        self.out_proj = Unprojected()
        self.init_parameters()

    def init_parameters(self) -> None:
        nn.init.normal_(self.w1, std=self.w1.shape[1] ** -0.5)
        nn.init.normal_(self.w2, std=self.hidden**-0.5)
        nn.init.zeros_(self.b1)
        nn.init.zeros_(self.b2)

    def resize(self, max_len: int) -> None:
        """Change the longest sequence to ``max_len`` tokens; weights are interpolated linearly along positions."""
        if not isinstance(max_len, int) or max_len < 1:
            self.refuse(f"resize needs a positive length, got {max_len!r}")
        with torch.no_grad():
            w1, w2, b2 = (
                F.interpolate(a[None], size=max_len, mode="linear")[0] for a in (self.w1, self.w2.T, self.b2[None])
            )
        self.w1, self.w2, self.b2 = (
            replacing_parameter(self.w1, w1),
            replacing_parameter(self.w2, w2.T),
            replacing_parameter(self.b2, b2[0]),
        )
        self.max_len = self.max_context_len = max_len

    def functional_args(self, inputs: Inputs) -> Arguments:
        """Return the arguments of ``mlp_mixer`` for this input: (positional, keyword)."""
        x, positions, key_mask = inputs.x, inputs.positions, inputs.key_mask
        if positions is None and key_mask is None:
            T = x.shape[1]
            weights = self.w1[:, :T], self.b1, self.w2[:T], self.b2[:T]
        else:
            positions = token_positions(x, key_mask) if positions is None else positions
            weights = self.w1.T[positions].transpose(1, 2), self.b1, self.w2[positions], self.b2[positions]
        return (x, *weights), {"causal": self.causal, "key_mask": key_mask}

    def mixing_cost(self, T: int) -> MixingCost:
        flops = 4 * T * self.hidden * self.dim
        return MixingCost(flops, flops, 4 * T * self.dim + 8 * self.hidden * self.dim)
