"""What check_recurrence finds: nothing in right functions of both signatures, and each planted bug."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from tokenmix import MixerError, functional
from tokenmix.testing import RECURRENCE_PROMISES, ContractError, check_recurrence

RULES = {"gated_delta": ("g", "beta"), "delta": ("beta",), "gated": ("g",), "linear": ()}


def fla(
    q,
    k,
    v,
    g=None,
    beta=None,
    scale=None,
    initial_state=None,
    output_final_state=False,
    cu_seqlens=None,
    use_qk_l2norm_in_kernel=False,
    *,
    bug="",
    rule="gated_delta",
):
    """Compute what flash-linear-attention's functions compute, with a bug by name."""
    if bug == "changes its decay":
        g.mul_(1.0)
        g.add_(1e-9).sub_(1e-3)
    if bug == "normalises with a maximum" and use_qk_l2norm_in_kernel:
        q, k = (F.normalize(a, dim=-1) for a in (q, k))
        use_qk_l2norm_in_kernel = False
    if bug == "takes every other head" and k.shape[2] != v.shape[2]:
        q, k = (a.repeat(1, 1, v.shape[2] // k.shape[2], 1) for a in (q, k))
    if bug == "no gradient of the decay":
        g = g.detach()
    if bug == "subtracts sums of decays":
        g = torch.diff(g.cumsum(1), dim=1, prepend=torch.zeros_like(g[:, :1]))
    if bug == "reads before it decays":
        return read_before_decay(q, k, v, g, beta)
    if bug == "the state has the other layout" and initial_state is not None:
        initial_state = initial_state.reshape(*initial_state.shape[:2], *initial_state.shape[:1:-1]).mT
    o, S = functional.recurrence(
        q,
        k,
        v,
        decay=g,
        beta=None if bug == "no beta" else beta,
        rule=rule,
        past=None if bug == "starts anew" else initial_state,
        scale=None if bug == "no scale" else scale,
        cu_seqlens=None if bug == "no documents" else cu_seqlens,
        l2norm=use_qk_l2norm_in_kernel,
    )
    if bug == "in half precision":
        o = o.bfloat16().float()
    if bug == "the state has the other layout":
        S = S.mT.reshape(S.shape)
    return o, S if output_final_state else None


def read_before_decay(q, k, v, g, beta):
    """Compute S_t = e^g S + k beta (v - S^T k)^T, where the state is read before it decays."""
    S, outputs = q.new_zeros(q.shape[0], v.shape[2], k.shape[3], v.shape[3]), []
    q, k = (a.repeat_interleave(v.shape[2] // a.shape[2], 2) for a in (q, k))
    for t in range(q.shape[1]):
        d = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = torch.exp(g[:, t, :, None, None]) * S + k[:, t, :, :, None] * d[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * k.shape[3] ** -0.5)
    return torch.stack(outputs, 1), S


def mamba(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    dt_softplus=False,
    return_final_states=False,
    *,
    bug="",
):
    """Compute what mamba_chunk_scan_combined computes, with a bug by name."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus and bug != "no softplus" else dt
    past = None if initial_states is None else initial_states.mT
    lengths = (
        None if seq_idx is None or bug == "no documents" else torch.unique_consecutive(seq_idx, return_counts=True)
    )
    ends = None if lengths is None else F.pad(lengths[1].cumsum(0), (1, 0))
    v = x if bug == "no step" else x * dt[..., None]
    o, S = functional.recurrence(C, B, v, decay=A * dt, rule="gated", scale=1.0, past=past, cu_seqlens=ends)
    o = o if bug == "no skip" else o + D[:, None] * x
    o = o if z is None else o * F.silu(z)
    return (o, S if bug == "the state has the other layout" else S.mT) if return_final_states else o


def step(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, *, bug=""):
    """Compute what selective_state_update computes, with a bug by name."""
    dt = dt if dt_bias is None else dt + dt_bias
    dt = F.softplus(dt) if dt_softplus else dt
    group = x.shape[1] // B.shape[1]
    B, C = (a.repeat_interleave(group, 1)[:, :, None] for a in (B, C))
    new = state * torch.exp(dt[..., None] * A) + dt[..., None] * B * x[..., None]
    y = ((state if bug == "reads before it writes" else new) * C).sum(-1) + D * x
    if bug != "keeps its state":
        state.copy_(new)
    return y if z is None else y * F.silu(z)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("decay", ["head", "feature"])
def test_the_librarys_own_recurrence_keeps_every_promise(rule, decay):
    report = check_recurrence(functools.partial(fla, rule=rule), "fla", rule=rule, decay=decay)
    assert {r.status for r in report.results} <= {"kept", "not applicable"}
    assert sum(r.status == "kept" for r in report.results) >= len(RECURRENCE_PROMISES) - 2


def test_functions_with_the_signatures_of_mamba_keep_every_promise():
    for report in (check_recurrence(mamba, "mamba_ssm"), check_recurrence(step, "mamba_ssm_step")):
        assert {r.status for r in report.results} <= {"kept", "not applicable"}


BUGS = {
    "the state has the other layout": "state_equals_equation",
    "reads before it decays": "output_equals_equation",
    "no beta": "output_equals_equation",
    "in half precision": "output_equals_equation",
    "starts anew": "goes_on_from_a_state",
    "no scale": "uses_the_scale",
    "no documents": "documents_stay_apart",
    "no gradient of the decay": "gradients_equal_equation",
    "normalises with a maximum": "normalises_queries_and_keys",
    "takes every other head": "values_share_keys",
    "changes its decay": "leaves_its_inputs",
    "subtracts sums of decays": "forgets_everything",
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug):
    with pytest.raises(ContractError) as found:
        check_recurrence(functools.partial(fla, bug=bug), "fla", promises=[BUGS[bug]])
    assert found.value.report.failures[0].status == "broken"


OF_MAMBA = {
    "no softplus": "gates_and_softplus",
    "no documents": "documents_stay_apart",
    "no step": "output_equals_equation",
    "no skip": "output_equals_equation",
    "the state has the other layout": "state_equals_equation",
}


@pytest.mark.parametrize("bug", OF_MAMBA)
def test_a_bug_in_a_scan_is_found(bug):
    with pytest.raises(ContractError, match=OF_MAMBA[bug]):
        check_recurrence(functools.partial(mamba, bug=bug), "mamba_ssm", promises=[OF_MAMBA[bug]])


@pytest.mark.parametrize("bug", ["reads before it writes", "keeps its state"])
def test_a_bug_in_a_step_is_found(bug):
    with pytest.raises(ContractError, match="output_equals_equation"):
        check_recurrence(functools.partial(step, bug=bug), "mamba_ssm_step", promises=["output_equals_equation"])


def test_the_smallest_input_comes_first():
    with pytest.raises(ContractError, match=r"documents reach each other.*lengths=\(1, 1\)"):
        check_recurrence(functools.partial(fla, bug="no documents"), "fla", promises=["documents_stay_apart"])


def test_wrong_names_are_refused():
    with pytest.raises(MixerError, match="signature is one of fla, mamba_ssm, mamba_ssm_step, got 'triton'"):
        check_recurrence(fla, "triton")
    with pytest.raises(MixerError, match="rule is one of linear, gated, delta, gated_delta, got 'rwkv'"):
        check_recurrence(fla, "fla", rule="rwkv")
    with pytest.raises(MixerError, match="no promise is called 'speed'"):
        check_recurrence(fla, "fla", promises=["speed"])
