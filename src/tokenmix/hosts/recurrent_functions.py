"""Compute what the functions of transformers' recurrent layers compute, with their arguments, on the C kernels.

Documents that are packed into a row come as ``seq_idx`` (B, T), the document of each token, or as their ends,
``cu_seqlens`` or ``cu_seq_lens_q`` (documents + 1,), for one row. They share neither a state nor a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import MixerError
from ..functional.recurrence import recurrence
from ..kernels.backend import steps
from ..kernels.cpu import recurrence as kernel
from ..kernels.extended import has_gradient
from ..kernels.precision import at_least_float32

Function = Callable[..., Any]


def find_starts(given: dict[str, Any], rows: int, tokens: int, device: torch.device) -> Tensor | None:
    """Return at which tokens of (B, T) a document starts, the first of each row among them; None: one in each row.

    Raises:
        MixerError: the documents do not fit B and T, or are told in two ways that differ.
    """
    index, ends = given.get("seq_idx"), given.get("cu_seqlens")
    ends = given.get("cu_seq_lens_q") if ends is None else ends
    told = []
    if index is not None:
        if index.shape != (rows, tokens):
            raise MixerError(
                f"cpu_kernels: seq_idx {tuple(index.shape)} does not name a document of each of the {rows} x {tokens} "
                "tokens; packed documents come without a cache."
            )
        told.append(F.pad(index.diff() != 0, (1, 0), value=True))
    if ends is not None:
        if rows != 1 or int(ends[0]) != 0 or int(ends[-1]) != tokens or bool((ends.diff() < 0).any()):
            raise MixerError(
                f"cpu_kernels: the ends of packed documents must rise from 0 to the {tokens} tokens of one row, got "
                f"{ends.numel()} from {int(ends[0])} to {int(ends[-1])} for {rows} rows; give them without a cache."
            )
        starts = torch.zeros(1, tokens, dtype=torch.bool, device=device)
        starts[0, ends[ends < tokens].long()] = True
        told.append(starts)
    if len(told) == 2 and not torch.equal(*told):
        raise MixerError("cpu_kernels: seq_idx and cu_seq_lens_q name different documents.")
    return told[0] if told and bool(told[0][:, 1:].any()) else None


def _positions(given: dict[str, Any], x: Tensor, past: Tensor | None) -> Tensor | None:
    """Return 0 where a token of x (B, T, ...) starts a document, else 1."""
    starts = find_starts(given, x.shape[0], x.shape[1], x.device)
    if starts is not None and past is not None:
        raise MixerError("cpu_kernels: packed documents cannot go on from a state; call the layer without a cache.")
    return None if starts is None else (~starts).long()


def run_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **given: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run a gated delta rule, with a decay per head (B, T, H) or per feature (B, T, H, dk), from a state or without."""
    if query.shape[1] == 1 and initial_state is not None and use_qk_l2norm_in_kernel:
        found = _run_one(query, key, value, g, beta, initial_state)
        if found is not None:
            return found
    y, state = recurrence(
        query,
        key,
        value,
        decay=g,
        beta=beta,
        past=initial_state,
        positions=_positions(given, query, initial_state),
        l2norm=use_qk_l2norm_in_kernel,
    )
    return y, state if output_final_state else None


def _run_one(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, past: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Run one token on the kernel without the checks of ``recurrence``, which take longer; None where it needs them."""
    q, k, v, g, b = (a.float().contiguous() for a in (query, key, value, g, beta))
    (B, _, HK, K), (H, V) = k.shape, v.shape[2:]
    g = g if g.ndim == 4 else g[..., None]
    sizes = (q.shape, v.shape[:2], g.shape[:3], b.shape, past.shape)
    if sizes != (k.shape, (B, 1), (B, 1, H), (B, 1, H), (B, H, K, V)) or g.shape[3] not in (1, K) or H % HK:
        return None
    if max(K, V) > kernel.WIDEST or past.dtype is not torch.float32 or not steps((q, k, v, g, b), (past,)):
        return None
    both = torch.stack((q, k))
    q, k = (both * (both.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).unbind()
    found, *_ = kernel.forward(q, k, v, g, b, past, None, None, delta=True, scale=K**-0.5, save=False)
    y, state = found.split([v.numel(), past.numel()])
    return y.view(v.shape).to(query.dtype), state.view(past.shape)


def _steps(dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    """Return the steps of Mamba-2 in the dtype that transformers has them in."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return (F.softplus(dt) if softplus else dt).clamp(*limit)


def run_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **given: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the scan of Mamba-2: x (B, T, H, P), B and C (B, T, groups, N), states (B, H, P, N)."""
    dt = _steps(dt, dt_bias, dt_softplus, dt_limit)
    x = at_least_float32(hidden_states)
    y, state = recurrence(
        at_least_float32(C),
        at_least_float32(B),
        x * dt[..., None],
        decay=A.to(x.dtype) * dt,
        rule="gated",
        scale=1.0,
        past=None if initial_states is None else initial_states.mT,
        positions=_positions(given, x, initial_states),
    )
    y = y if D is None else y + D[:, None] * x
    return (y, state.mT.contiguous()) if return_final_states else y


def run_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    *,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **given: Any,
) -> Tensor:
    """Run a step of Mamba-2: x, dt, D and z (B, H, P) and A (H, P, N), B and C (B, groups, N), the state in place.

    Keeps the steps in their limit as the scan does; transformers' step does not.
    """
    if dt.stride(-1) == A.stride(-1) == A.stride(-2) == 0:  # one number for each head, expanded
        dt, A = dt[..., :1], A[:, :1, :1]
        dt_bias = None if dt_bias is None else dt_bias[..., :1]
    step = _steps(dt, dt_bias, dt_softplus, dt_limit).to(state.dtype)
    B, C = (a.repeat_interleave(state.shape[1] // a.shape[1], 1).to(state.dtype) for a in (B, C))
    x = hidden_states.to(state.dtype)
    decay, new = torch.exp(step[..., None] * A), ((x * step)[..., None], B[:, :, None])
    if has_gradient(state, decay, *new):
        after = torch.addcmul(state.clone() * decay, *new)  # backward needs the state as it was
        state.copy_(after)
    else:
        after = state.mul_(decay).addcmul_(*new)
    y = (after @ C[..., None]).squeeze(-1)
    y = y if D is None else y + x * D
    y = y if z is None else y * F.silu(z)
    return y.to(hidden_states.dtype)


def run_nothing(*args: Any, **given: Any) -> None:
    """Stand for a function that fuses what the other functions do, and of which None says that there is none."""


def _activate(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    from transformers.activations import ACT2FN

    return ACT2FN[activation](y)  # type: ignore[no-any-return]  # a module of transformers


def run_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **given: Any
) -> Tensor:
    """Convolve x (B, C, T) with ``weight`` (C, s), feature by feature, document by document."""
    B, _, T = hidden_states.shape
    before = weight.shape[1] - 1
    starts = find_starts(given, B, T, hidden_states.device)
    x, index = at_least_float32(hidden_states.transpose(1, 2)), None
    if starts is None or B * T == 0:
        x = F.pad(x, (0, 0, before, 0))
    else:  # all rows as one, with zeros before each document
        index = torch.arange(B * T, device=x.device) + before * starts.flatten().cumsum(0)
        apart = x.new_zeros(1, int(index[-1]) + 1, x.shape[2])
        x = apart.index_copy(1, index, x.reshape(1, B * T, -1))
    taps, length = weight.to(x.dtype).T.contiguous(), x.shape[1] - before
    y = x[:, before:] * taps[before]
    for j in range(before):
        y.addcmul_(x[:, j : j + length], taps[j])
    y = y if bias is None else y.add_(bias)
    if index is not None:
        y = y.index_select(1, index - before).view(B, T, -1)
    return _activate(y, activation).to(hidden_states.dtype).transpose(1, 2)


def run_convolution_update(
    hidden_states: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Convolve the next token (B, C, 1) after the last ones (B, C, n), n >= s - 1, which are moved on in place."""
    recent = torch.cat([conv_state, hidden_states], -1)
    conv_state.copy_(recent[..., -conv_state.shape[-1] :])
    y = (at_least_float32(recent[..., -weight.shape[1] :]) * weight).sum(-1, keepdim=True)
    return _activate(y if bias is None else y + bias[:, None], activation).to(hidden_states.dtype)


def run_gate(gate: nn.Module, hidden_states: Tensor) -> Tensor:
    """Compute Kimi Linear's log-decay (B, T, H, dk); transformers' gradients are NaN above a pre-activation of 88.7."""
    of: Any = gate
    x = (of.f_b_proj(of.f_a_proj(hidden_states)).float() + of.dt_bias.float()).unflatten(-1, (-1, of.head_dim))
    return -of.A_log.float().exp() * F.softplus(x)


FUNCTIONS: dict[str, Function] = {
    "causal_conv1d_fn": run_convolution,
    "causal_conv1d_update": run_convolution_update,
    "torch_chunk_gated_delta_rule": run_delta_rule,
    "torch_recurrent_gated_delta_rule": run_delta_rule,
    "chunk_kimi_delta_attention": run_delta_rule,
    "recurrent_kimi_delta_attention": run_delta_rule,
    "mamba2_chunk_scan": run_scan,
    "mamba2_split_conv1d_scan_combined": run_nothing,
    "mamba2_selective_state_update": run_state_update,
}
"""Name in transformers -> ours."""

DELTA = ("query", "key", "value", "g", "beta")
DELTA_REST = ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
SCAN = ("hidden_states", "dt", "A", "B", "C")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "causal_conv1d_fn": ("hidden_states", "weight", "bias", "activation"),
    "causal_conv1d_update": ("hidden_states", "conv_state", "weight", "bias", "activation"),
    "torch_chunk_gated_delta_rule": (*DELTA, "chunk_size", *DELTA_REST),
    "torch_recurrent_gated_delta_rule": (*DELTA, *DELTA_REST),
    "chunk_kimi_delta_attention": (*DELTA, "chunk_size", *DELTA_REST),
    "recurrent_kimi_delta_attention": (*DELTA, *DELTA_REST),
    "mamba2_chunk_scan": (
        *(*SCAN, "chunk_size", "D", "dt_bias", "initial_states"),
        *("dt_softplus", "dt_limit", "return_final_states"),
    ),
    "mamba2_split_conv1d_scan_combined": (
        *("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size", "initial_states", "dt_limit"),
        *("return_final_states", "activation", "rmsnorm_weight", "rmsnorm_eps", "outproj_weight", "outproj_bias"),
        *("headdim", "ngroups", "norm_before_gate"),
    ),
    "mamba2_selective_state_update": ("state", *SCAN, "D", "dt_bias", "dt_softplus", "z"),
}
"""The arguments of the functions of transformers, without those that all but the second take besides."""


def replace_function(name: str, theirs: Function, layer: Any) -> Function:
    """Build the function that runs ours for tensors on a CPU and theirs elsewhere."""
    ours = FUNCTIONS[name]
    if ours is run_state_update:  # transformers does not hand it the limit
        ours = partial(ours, dt_limit=layer.time_step_limit)

    def run(first: Tensor, *args: Any, **given: Any) -> Any:
        return (ours if first.is_cpu else theirs)(first, *args, **given)

    return run
