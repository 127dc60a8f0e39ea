"""Mamba-2 (Dao and Gu 2024, arXiv 2405.21060): a gated recurrence with steps that the tokens choose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.layout.masks import zero_masked
from ..functional.recurrence import recurrence
from ..functional.sums.gated_norm import Read, gated_norm, hide_gate
from ..functional.sums.nonfinite import propagate_nonfinite, propagate_nonfinite_chunk
from ..kernels.backend import Backend
from ..kernels.precision import at_least_float32, exact
from ..mixers.base import About, Facts
from ..mixers.cost import MixingCost
from ..mixers.parts.history import join_rings
from ..mixers.parts.options import at_least, check_numbers, check_positive
from ..mixers.parts.recurrent import Recurrent, start_steps
from ..types import Options


@exact
def mamba2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt: Tensor,
    z: Tensor,
    skip: Tensor,
    weight: Tensor | None = None,
    *,
    heads: int,
    groups: int = 1,
    causal: bool = True,
    key_mask: Tensor | None = None,
    norm: bool = True,
    eps: float = 1e-5,
    backend: Backend = "auto",
) -> Tensor:
    """Compute norm((S_t^T q_t + skip v_t) * silu(z_t)), with S_t = e^{g_t} S_{t-1} + dt_t k_t v_t^T in each head.

    Dao and Gu 2024, arXiv 2405.21060, Eq. 2, where q, k and v are C, B and x. See ``functional.recurrence``.

    Args:
        q, k: (B, T, groups N); each group serves heads / groups neighbouring heads.
        v: (B, T, heads P).
        decay: the log-decay g <= 0, (B, T, heads).
        dt: (B, T, heads), how much is written.
        z: (B, T, heads P), the input of the gate.
        skip: (heads,), the weight of the token's own value in its output.
        weight: (heads P,), the gain of the norm; None: no norm.
        heads: number of heads.
        groups: number of groups of queries and keys, and of the norm.
        causal: True; there is no other form here.
        key_mask: bool (B, T), True = this token is written. A masked token leaves the state as it is, undecayed.
        norm: whether to normalise at all.
        eps: added to the mean square in the norm.
        backend: how to run; see ``choose``.

    Returns:
        (B, T, heads P) in q's dtype; exactly 0 where nothing was written yet.

    Raises:
        MixerError: shapes, dtypes or options do not fit, or the requested backend cannot run this call.
    """
    if causal is not True:
        raise MixerError(f"mamba2: has only a causal form, got causal={causal!r}.")
    options: Options = {
        "skip": skip,
        "weight": weight if norm else None,
        "key_mask": key_mask,
        "eps": eps,
        "backend": backend,
    }
    read: Callable[..., Read] = partial(_read, heads=heads, groups=groups, **options)

    def form(z: Tensor | None) -> tuple[Tensor, None]:
        def whole(q: Tensor, *keys: Tensor) -> Tensor:
            return read(q, *keys, z=z)[0]

        return propagate_nonfinite(whole, q, k, v, decay, dt, causal=True, key_mask=key_mask), None

    return hide_gate(form, z)[0]


@exact
def mamba2_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt: Tensor,
    z: Tensor,
    skip: Tensor,
    weight: Tensor | None = None,
    *,
    past: Tensor,
    heads: int,
    groups: int = 1,
    key_mask: Tensor | None = None,
    norm: bool = True,
    eps: float = 1e-5,
) -> tuple[Tensor, tuple[Tensor]]:
    """Compute the same for the next tokens of a stream after ``past``, S (B, heads, N, P), and S after them."""
    options: Options = {
        "skip": skip,
        "weight": weight if norm else None,
        "key_mask": key_mask,
        "eps": eps,
        "past": past,
    }
    read: Callable[..., Read] = partial(_read, heads=heads, groups=groups, **options)
    return hide_gate(lambda z: propagate_nonfinite_chunk(partial(read, z=z), q, k, v, decay, dt, key_mask=key_mask), z)


def _read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt: Tensor,
    *,
    z: Tensor | None,
    skip: Tensor,
    weight: Tensor | None,
    heads: int,
    groups: int,
    eps: float,
    key_mask: Tensor | None,
    past: Tensor | None = None,
    backend: Backend = "auto",
) -> Read:
    """Return the outputs (B, T, heads P) in q's dtype, and the state after the last token."""
    v = at_least_float32(zero_masked(v, key_mask)).unflatten(-1, (heads, -1))
    o, after = recurrence(
        at_least_float32(q).unflatten(-1, (groups, -1)),  # so that no output overflows before the norm
        k.unflatten(-1, (groups, -1)),
        v * zero_masked(dt, key_mask).to(v.dtype)[..., None],
        decay=decay,
        rule="gated",
        past=past,
        scale=1.0,
        key_mask=key_mask,
        backend=backend,
    )
    y = o + skip.to(v.dtype)[:, None] * v
    return gated_norm(y.flatten(2), z, weight, groups=groups, gate_first=True, eps=eps).to(q.dtype), (after,)


class Mamba2(Recurrent):
    """y_t = W_o norm((S_t^T c_t + D x_t) * silu(z_t)), with S_t = a_t S_{t-1} + dt_t b_t x_t^T in each head.

    Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). One projection gives z, the values x, the keys b, the queries c and dt;
    x, b and c pass a short convolution and silu. dt_t = softplus(W_dt u_t + dt_bias), and log a_t = -exp(A_log) dt_t.
    Maps (B, T, D) to (B, T, D).

    Args:
        heads: heads of values, each with a state, a decay and a step. Default 8; public models: expand dim / 64.
        expand: features of all values, in units of dim. Default 2.
        state_dim: features of a key or query, N. Default 128.
        groups: groups of keys and queries, each for heads / groups neighbouring heads, and of the norm. Default 1.
        dt_limit: bounds of dt, such as (0.0, 0.1); None (default): none.
        kernel_size: taps of the convolution, the identity at the start; 1: none. Default 4.
        conv_bias: whether the convolution has a bias. Default True.
        eps: of the norm. Default 1e-5.
        qkv_bias, out_bias: biases of in_proj and out_proj; False by default, as in all public models.

    Parameters: in_proj, conv, A_log, dt_bias, D (heads each), norm (expand dim), out_proj. Time O(T N expand D). The
    streaming state is N expand D numbers and kernel_size - 1 tokens. A masked token changes and decays nothing.

    Deviations: public models start the convolution at random. Theirs lets padding decay the state, which is harmless
    only to the left of a sequence.

    Raises:
        MixerError: if an option is out of its range.
    """

    facts = Facts(
        about=About(
            "Dao and Gu 2024, arXiv 2405.21060",
            "recurrence",
            "T N D",
            "T D",
            idea="a state per head that decays by a step the token chooses",
        ),
        form=mamba2,
    )
    chunk = staticmethod(mamba2_chunk)

    def __init__(
        self,
        dim: int,
        *,
        causal: bool = True,
        heads: int = 8,
        expand: int = 2,
        state_dim: int = 128,
        groups: int = 1,
        dt_limit: tuple[float, float] | None = None,
        kernel_size: int = 4,
        conv_bias: bool = True,
        eps: float = 1e-5,
        qkv_bias: bool = False,
        out_bias: bool = False,
    ):
        super().__init__(dim, causal=causal)
        at_least(self, 1, heads=heads, expand=expand, state_dim=state_dim, groups=groups)
        check_positive(self, eps=eps)
        inner = expand * dim
        if inner % heads or heads % groups:
            self.refuse(f"heads={heads} must divide expand * dim = {inner}, and groups={groups} must divide heads")
        self.heads, self.groups, self.inner, self.eps = heads, groups, inner, eps
        self.dt_limit = None if dt_limit is None else self._check_limit(dt_limit)
        self.memory = heads, state_dim, inner // heads
        self._set_up(inner + 2 * groups * state_dim, kernel_size, bias=conv_bias)
        self.in_proj = nn.Linear(dim, inner + self.width + heads, bias=qkv_bias)
        self.A_log, self.dt_bias, self.D = (nn.Parameter(torch.empty(heads)) for _ in range(3))
        self.norm = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, dim, bias=out_bias)
        self.init_parameters()

    def _check_limit(self, dt_limit: Any) -> tuple[float, float]:
        """Return the bounds of dt; refuse anything but two numbers that rise from 0 or more."""
        if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
            self.refuse(f"dt_limit must be a pair, the least and the largest dt, got {dt_limit!r}")
        for value in dt_limit:
            check_numbers(self, dt_limit=value)
        if not 0 <= dt_limit[0] < dt_limit[1]:
            self.refuse(f"dt_limit must rise from 0 or more, got {dt_limit!r}")
        return dt_limit[0], dt_limit[1]

    def init_parameters(self) -> None:
        with torch.no_grad():
            self.A_log.uniform_(1.0, 16.0).log_()
            start_steps(self.dt_bias)
            self.D.fill_(1.0)
            self.norm.fill_(1.0)

    def project(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        z, mixed, dt = self.in_proj(x).split([self.inner, self.width, self.heads], -1)
        return mixed, (z, dt)

    def steps(self, logits: Tensor) -> Tensor:
        """Return dt (B, T, heads) from its logits."""
        dt = nn.functional.softplus(at_least_float32(logits) + at_least_float32(self.dt_bias))
        return dt if self.dt_limit is None else dt.clamp(*self.dt_limit)

    def arguments(self, mixed: Tensor, rest: tuple[Tensor, Tensor]) -> tuple[Tensor | None, ...]:
        (z, logits), keys = rest, self.groups * self.memory[1]
        v, k, q = mixed.split([self.inner, keys, keys], -1)
        dt = self.steps(logits)
        return q, k, v, -at_least_float32(self.A_log).exp() * dt, dt, z, self.D, self.norm

    def options(self) -> dict[str, Any]:
        return {"heads": self.heads, "groups": self.groups, "norm": True, "eps": self.eps}

    def mixing_cost(self, T: int) -> MixingCost:
        H, N, P = self.memory
        flops = 5 * T * H * N * P + 2 * T * self.width * self.kernel_size
        kept = T * H * (46 * (N + P) + 400)
        return MixingCost(flops=flops, counted=None, activations=kept, state=self.state_size())

    def fades(self, x, valid):
        decay = -at_least_float32(self.A_log).exp() * self.steps(self.project(x)[1][1])
        return zero_masked(decay, valid).sum(1), None

    def join_states(self, earlier, later, fade):
        kept = torch.exp(fade.to(later.memory.dtype))[..., None, None] * earlier.memory
        return join_rings(earlier, later)[0]._replace(memory=later.memory + kept)
