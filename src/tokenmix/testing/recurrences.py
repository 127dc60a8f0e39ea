"""Check a gated linear recurrence of others, such as a kernel, against the equation in float64."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..errors import MixerError
from ..functional.recurrence import RULES, Rule
from ..types import Options
from .inputs import noise, uniform
from .loading import one_line
from .report import ContractError, NotApplicable, PromiseReport, finite, same
from .suite import try_promise
from .tolerances import BY_DTYPE

Signature = Literal["fla", "mamba_ssm", "mamba_ssm_step"]
Tensors = dict[str, Tensor]
SIZES = ((1, 1), (1, 2), (2, 5), (2, 70), (1, 130))
"""Rows and tokens, the smallest first; kernels take chunks of 16 to 128 tokens."""
WIDTHS = ((16, 32), (16, 16))
"""Features of keys and of values. Equal ones hide a transposed state from its shape alone."""
CHUNK = 16
"""The chunk_size that mamba_ssm's functions are given."""


@dataclass(frozen=True)
class RecurrenceSubject:
    """A recurrence of others, with what calls it and what it must equal.

    Tensors are q, k (B, T, H, dk), v (B, T, Hv, dv), decay (B, T, Hv) or (B, T, Hv, dk), beta (B, T, Hv), past
    (B, Hv, dk, dv); in the signatures of mamba_ssm q is C, k is B, v is x, and there are dt, A and D.
    """

    fn: Callable[..., Any]
    signature: Signature
    rule: Rule
    by_feature: bool
    state_v_first: bool
    dtype: torch.dtype
    device: str
    tolerance: float
    seed: int = 0

    @property
    def names(self) -> frozenset[str]:
        """The names of the arguments of the function."""
        return frozenset(inspect.signature(self.fn).parameters)

    @property
    def of_mamba(self) -> bool:
        """Whether the signature is one of mamba_ssm."""
        return self.signature != "fla"

    def must_take(self, *names: str) -> str:
        """Return the first of these arguments that the function names, or say that the promise does not apply."""
        found = [name for name in names if name in self.names]
        if not found:
            raise NotApplicable(f"the function names no {' or '.join(names)}")
        return found[0]

    def draw(self, rows: int, length: int, widths: tuple[int, int] = WIDTHS[0], *, groups: int = 1) -> Tensors:
        """Draw inputs in float64, rounded to the dtype: keys of length at most 1, decays that halve in a few tokens.

        Args:
            groups: heads of values for each head of keys.
        """
        H, (dk, dv), seed = 2, widths, self.seed + 100 * length
        t: Tensors = {name: noise(rows, length, H, dk, seed=seed + i) for i, name in enumerate("qk")}
        t["k"] = F.normalize(t["k"], dim=-1)
        t["v"] = noise(rows, length, H * groups, dv, seed=seed + 3)
        if self.of_mamba:
            t["dt"] = uniform(rows, length, H * groups, seed=seed + 4, low=0.05, high=0.6)
            t["A"] = -uniform(H * groups, seed=seed + 5, low=0.5, high=2.0)
            t["D"] = noise(H * groups, seed=seed + 6)
        if not self.of_mamba and "gated" in self.rule:
            by_feature = (dk,) if self.by_feature else ()
            t["decay"] = -uniform(rows, length, H * groups, *by_feature, seed=seed + 4, low=0.01, high=0.8)
        if "delta" in self.rule:
            t["beta"] = uniform(rows, length, H * groups, seed=seed + 5, low=0.1, high=1.0)
        return {name: a.to(self.dtype).double() for name, a in t.items()}

    def past(self, rows: int, widths: tuple[int, int] = WIDTHS[0], *, heads: int = 2) -> Tensor:
        """Draw a state (B, Hv, dk, dv)."""
        return noise(rows, heads, *widths, seed=self.seed + 50).to(self.dtype).double()

    def exact(self, t: Tensors, *, scale: float | None = None, l2norm: bool = False) -> tuple[Tensor, Tensor]:
        """Compute the equation in float64."""
        q, k, v, decay = t["q"], t["k"], t["v"], t.get("decay")
        if l2norm:
            q, k = (a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for a in (q, k))
        rule, scale = ("gated", 1.0) if self.of_mamba else (self.rule, scale)
        x = v
        if self.of_mamba:
            dt = t["dt"] if "dt_bias" not in t else F.softplus(t["dt"] + t["dt_bias"])
            decay, v = dt * t["A"], v * dt[..., None]
        past = t.get("past")
        o, S = reference.recurrence(q, k, v, decay=decay, beta=t.get("beta"), rule=rule, past=past, scale=scale)
        if self.of_mamba:
            o = o + t["D"][:, None] * x
        return (o * F.silu(t["z"]) if "z" in t else o), S

    def run(self, t: Tensors, **given: Any) -> tuple[Tensor, Tensor | None]:
        """Call the function with its own signature, and return the output and the state in our layout."""
        t = {name: a.to(self.device, self.dtype) for name, a in t.items()}
        call = {"fla": self._call_fla, "mamba_ssm": self._call_mamba, "mamba_ssm_step": self._call_steps}
        o, S = call[self.signature](t, given)
        return o, None if S is None else S.transpose(-1, -2) if self.state_v_first or self.of_mamba else S

    def _to_theirs(self, S: Tensor) -> Tensor:
        """Return a state in the layout of the function."""
        return S.transpose(-1, -2).contiguous() if self.state_v_first or self.of_mamba else S

    def _call_fla(self, t: Tensors, given: Options) -> tuple[Tensor, Tensor | None]:
        named: Options = dict(given)
        named |= {theirs: t[ours] for ours, theirs in (("decay", "g"), ("beta", "beta")) if ours in t}
        if "initial_state" in self.names:
            named["initial_state"] = self._to_theirs(t["past"]) if "past" in t else None
        if "output_final_state" in self.names:
            named["output_final_state"] = True
        if "state_v_first" in self.names:
            named["state_v_first"] = self.state_v_first
        out = self.fn(t["q"], t["k"], t["v"], **named)
        return out[:2] if isinstance(out, tuple) else (out, None)

    def _call_mamba(self, t: Tensors, given: Options) -> tuple[Tensor, Tensor | None]:
        named: Options = {**given, "D": t["D"]}
        if "past" in t:
            named["initial_states"] = self._to_theirs(t["past"])
        if "z" in t:
            named["z"] = t["z"]
        if "dt_bias" in t:
            named |= {"dt_bias": t["dt_bias"], "dt_softplus": True}
        if "return_final_states" in self.names:
            named["return_final_states"] = True
        out = self.fn(t["v"], t["dt"], t["A"], t["k"], t["q"], CHUNK, **named)
        return out[:2] if isinstance(out, tuple) else (out, None)

    def _call_steps(self, t: Tensors, given: Options) -> tuple[Tensor, Tensor | None]:
        x, (dk, dv) = t["v"], (t["k"].shape[-1], t["v"].shape[-1])
        B, T, H, _ = x.shape
        S = self._to_theirs(t["past"]).clone() if "past" in t else x.new_zeros(B, H, dv, dk)
        A, D = t["A"][:, None, None].expand(H, dv, dk), t["D"][:, None].expand(H, dv)
        outputs = []
        for s in range(T):
            named: Options = {**given, "z": t["z"][:, s]} if "z" in t else dict(given)
            if "dt_bias" in t:
                named |= {"dt_bias": t["dt_bias"][:, None].expand(H, dv), "dt_softplus": True}
            step = t["dt"][:, s, :, None].expand(B, H, dv)
            with torch.no_grad():  # which changes the state in place
                outputs.append(self.fn(S, x[:, s], step, A, t["k"][:, s], t["q"][:, s], D=D, **named))
        return torch.stack(outputs, 1), S

    def same(self, got: Tensor, want: Tensor, what: str, **given: Any) -> None:
        """Compare with the equation, with the tolerance of the dtype."""
        same(got.cpu(), want, what, tol=self.tolerance, **given)


def output_equals_equation(s: RecurrenceSubject) -> None:
    """The output equals the equation in float64, of any number of tokens."""
    for rows, length in SIZES:
        t = s.draw(rows, length)
        s.same(s.run(t)[0], s.exact(t)[0], "the output differs from the equation", rows=rows, tokens=length)


def state_equals_equation(s: RecurrenceSubject) -> None:
    """The last state equals the equation, in the layout that the signature says."""
    for widths in WIDTHS:
        for rows, length in SIZES:
            t = s.draw(rows, length, widths)
            S = s.run(t)[1]
            if S is None:
                raise NotApplicable("the function returns no state")
            want = s.exact(t)[1]
            s.same(S, want, "the last state differs from the equation", tokens=length, dk_and_dv=widths)


def goes_on_from_a_state(s: RecurrenceSubject) -> None:
    """From a given state, output and last state equal the equation."""
    if s.signature != "mamba_ssm_step":
        s.must_take("initial_state", "initial_states")
    for widths in WIDTHS:
        for rows, length in SIZES:
            t = s.draw(rows, length, widths) | {"past": s.past(rows, widths)}
            got, want = s.run(t), s.exact(t)
            given = {"tokens": length, "dk_and_dv": widths}
            s.same(got[0], want[0], "the output after a state differs from the equation", **given)
            if got[1] is not None:
                s.same(got[1], want[1], "the last state after a state differs from the equation", **given)


def gradients_equal_equation(s: RecurrenceSubject) -> None:
    """The gradient of every argument equals that of the equation."""
    for rows, length in SIZES[1:]:
        _compare_gradients(s, s.draw(rows, length), tokens=length)
    if s.signature == "mamba_ssm_step" or "initial_state" in s.names or "initial_states" in s.names:
        _compare_gradients(s, s.draw(1, 5) | {"past": s.past(1)}, tokens=5)


def _compare_gradients(s: RecurrenceSubject, t: Tensors, **given: Any) -> None:
    found = []
    for run in (s.run, s.exact):
        leaves = {name: a.clone().requires_grad_() for name, a in t.items()}
        o = run(leaves)[0]
        if not o.requires_grad:
            raise NotApplicable("its output has no gradient")
        loss = (o.double() * noise(*o.shape, seed=9).to(o.device)).sum()
        found.append(torch.autograd.grad(loss, list(leaves.values()), allow_unused=True))
    for name, got, want in zip(t, *found, strict=True):
        if want is None:
            continue
        mine = torch.zeros_like(want) if got is None else got
        s.same(mine, want, f"the gradient of {name} differs from the equation's", **given)


def uses_the_scale(s: RecurrenceSubject) -> None:
    """A given scale takes the place of 1 / sqrt(dk)."""
    s.must_take("scale")
    t = s.draw(1, 3)
    for scale in (1.0, 0.3):
        s.same(s.run(t, scale=scale)[0], s.exact(t, scale=scale)[0], "the scale is not used", scale=scale)


def normalises_queries_and_keys(s: RecurrenceSubject) -> None:
    """With use_qk_l2norm_in_kernel, queries and keys are divided by sqrt(|.|^2 + 1e-6)."""
    s.must_take("use_qk_l2norm_in_kernel")
    for size in (1.0, 10.0, 1e-3):
        t = s.draw(1, 5)
        t |= {name: (size * noise(*t[name].shape, seed=3)).to(s.dtype).double() for name in "qk"}
        got, want = s.run(t, use_qk_l2norm_in_kernel=True)[0], s.exact(t, l2norm=True)[0]
        s.same(got, want, "queries and keys are normalised otherwise", size=size)


def values_share_keys(s: RecurrenceSubject) -> None:
    """Where several heads of values may share one head of queries and keys, it is consecutive ones."""
    for rows, length in ((1, 1), (1, 3), (2, 20)):
        t = s.draw(rows, length, groups=2)
        try:
            got = s.run(t)[0]
        except Exception as why:  # whatever a function raises that does not take them
            raise NotApplicable(f"it takes as many heads of values as of keys ({one_line(why)})") from why
        s.same(got, s.exact(t)[0], "shared keys: differs from the equation", tokens=length)


def documents_stay_apart(s: RecurrenceSubject) -> None:
    """Documents in one row, told by cu_seqlens or seq_idx, equal the documents apart."""
    name = s.must_take(*(("seq_idx",) if s.of_mamba else ("cu_seqlens",)))
    for lengths in ((1, 1), (1, 2), (2, 1), (3, 20, 1), (70, 5)):
        t = s.draw(1, sum(lengths))
        ends = [0, *accumulate(lengths)]
        index = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])[None]
        told = torch.tensor(ends) if name == "cu_seqlens" else index.to(torch.int32)
        got = s.run(t, **{name: told.to(s.device)})[0]
        apart = [s.exact({n: a[:, i:j] if a.ndim > 1 else a for n, a in t.items()})[0] for i, j in pairwise(ends)]
        s.same(got, torch.cat(apart, 1), "documents reach each other", lengths=lengths)


def forgets_everything(s: RecurrenceSubject) -> None:
    """Where a token forgets everything (a decay of e^-10000), later outputs and all gradients stay right."""
    for length, at in ((2, 1), (5, 2), (70, 30)):
        t = s.draw(1, length)
        name = "dt" if s.of_mamba else "decay"
        if name not in t:
            raise NotApplicable("it has no decay")
        t[name] = t[name].clone()
        t[name][:, at] = 1e4 if s.of_mamba else -1e4
        if s.of_mamba:
            t["v"] = t["v"].clone()
            t["v"][:, at] = 0.0
        got, want = s.run(t)[0], s.exact(t)[0]
        s.same(got, want, "after a token that forgets everything", tokens=length, at=at)
        leaves = {n: a.clone().requires_grad_() for n, a in t.items()}
        o = s.run(leaves)[0]
        if o.requires_grad:
            for n, g in zip(
                leaves, torch.autograd.grad(o.sum(), list(leaves.values()), allow_unused=True), strict=True
            ):
                if g is not None:
                    finite(g, f"the gradient of {n} where a token forgets everything", tokens=length, at=at)


def gates_and_softplus(s: RecurrenceSubject) -> None:
    """z gates the output by silu(z), and dt_bias is added to dt before softplus."""
    if not s.of_mamba:
        raise NotApplicable("of the signatures of mamba_ssm alone")
    plain = s.draw(1, 5)
    for name in ("z", "dt_bias"):
        if name in s.names:
            extra = noise(*plain["v"].shape, seed=4) if name == "z" else noise(plain["A"].shape[0], seed=4)
            t = plain | {name: extra.to(s.dtype).double()}
            s.same(s.run(t)[0], s.exact(t)[0], f"with {name}: differs from the equation")


def leaves_its_inputs(s: RecurrenceSubject) -> None:
    """No argument is changed in place; of a step, only the state is."""
    t = {name: a.to(s.device, s.dtype) for name, a in (s.draw(2, 20) | {"past": s.past(2)}).items()}
    if s.signature != "mamba_ssm_step" and not {"initial_state", "initial_states"} & s.names:
        t.pop("past")
    before = {name: a.clone() for name, a in t.items()}
    s.run(t)
    for name, a in before.items():
        same(t[name], a, f"{name} is changed in place", tol=0.0)


RECURRENCE_PROMISES = {
    f.__name__: f
    for f in (
        output_equals_equation,
        state_equals_equation,
        goes_on_from_a_state,
        gradients_equal_equation,
        uses_the_scale,
        normalises_queries_and_keys,
        values_share_keys,
        documents_stay_apart,
        forgets_everything,
        gates_and_softplus,
        leaves_its_inputs,
    )
}
"""The promises of recurrences, in the order of checking. The docstring of each states the promise."""


def check_recurrence(
    fn: Callable[..., Any],
    signature: Signature,
    *,
    rule: Rule = "gated_delta",
    decay: Literal["head", "feature"] = "head",
    state_v_first: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    tolerance: float | None = None,
    promises: Iterable[str] | None = None,
) -> PromiseReport:
    """Check a function with the signature of a known kernel against ``tokenmix.reference.recurrence`` in float64.

    ``check_recurrence(chunk_gated_delta_rule, "fla", device="cuda")`` is a test of flash-linear-attention's. Optional
    arguments are checked where the function names them: scale, initial_state, output_final_state, cu_seqlens,
    use_qk_l2norm_in_kernel; initial_states, return_final_states, seq_idx, z, dt_bias.

    Args:
        fn: "fla": f(q, k, v, g=, beta=, ...) -> (o, state), all (B, T, H, d), as chunk_gated_delta_rule, chunk_kda,
            chunk_delta_rule, chunk_simple_gla and chunk_gla are. "mamba_ssm": f(x, dt, A, B, C, chunk_size, D=, ...),
            as mamba_chunk_scan_combined. "mamba_ssm_step": f(state, x, dt, A, B, C, D=, ...), as
            selective_state_update, which changes the state.
        rule: of "fla": "gated_delta" (g and beta), "delta" (beta), "gated" (g), "linear" (neither).
        decay: of "fla": whether g is (B, T, H), or per feature of the key (B, T, H, dk), as that of chunk_kda.
        state_v_first: of "fla": whether states are (B, H, dv, dk). Those of mamba_ssm always are.
        dtype: of the arguments, which are rounded to it before the equation reads them.
        tolerance: relative to the largest number; by default that of the dtype. Kernels with TF32 need about 1e-3.
        promises: names of ``RECURRENCE_PROMISES``, to check only those.

    Raises:
        ContractError: with the report and the inputs that break a promise, the smallest first.
        MixerError: for an unknown signature, rule or promise.
    """
    if signature not in get_args(Signature):
        raise MixerError(f"check_recurrence: signature is one of {', '.join(get_args(Signature))}, got {signature!r}.")
    if rule not in RULES:
        raise MixerError(f"check_recurrence: rule is one of {', '.join(RULES)}, got {rule!r}.")
    names = list(RECURRENCE_PROMISES) if promises is None else list(promises)
    for name in names:
        if name not in RECURRENCE_PROMISES:
            known = ", ".join(RECURRENCE_PROMISES)
            raise MixerError(f"check_recurrence: no promise is called {name!r}; known: {known}.")
    rule = "gated" if signature != "fla" else rule
    allowed = BY_DTYPE[dtype] if tolerance is None else tolerance
    s = RecurrenceSubject(fn, signature, rule, decay == "feature", state_v_first, dtype, device, allowed)
    title = f"{getattr(fn, '__name__', type(fn).__name__)} as {signature}, {rule}, {str(dtype)[6:]}"
    report = PromiseReport(title, [try_promise(s, n, RECURRENCE_PROMISES[n], refusals=True) for n in names])
    if report.failures:
        raise ContractError(report)
    return report
