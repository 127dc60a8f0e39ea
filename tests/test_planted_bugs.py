"""Plant bugs while the program runs, and see them noticed: every promise and every kernel can fail.

A bug replaces a method, a function or a kernel of the library by one that is wrong; ``planted_bugs.py`` says how.

| kind | what is wrong |
|---|---|
| values and gradients | a window, a detached value, a second derivative, a row without keys |
| who sees whom | a later token, a masked one, padding, positions of another row, another row of the batch |
| numbers | overflow, NaN that spreads or disappears |
| shapes and layouts | a dtype, an empty batch, one token, strides, packed sequences |
| states and segments | a ring, a counter, a state that is shared, kept, too long or not checked, a merge |
| torch | compilation, export, traces, copies, the meta device, autocast, defaults, checkpoints, hooks |
| refusals | options, waivers, masks that are ignored or converted |
| kernels | each kernel in C: its tiles, rows, masks and gradients, and the steps of a stream |
| around the mixers | ranks; caches and surgery, packed texts, the loss (``test_planted_bugs_extras.py``) |

Bugs that only a sanitizer can see are in ``test_sanitizers.py``.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import test_kernels_decode
import test_kernels_recurrence
import test_kernels_tokenwise
import test_parallel
from planted_bugs import (
    Bug,
    Kernel,
    check,
    fact,
    form,
    function,
    method,
    name_of,
    new_states,
    outputs,
    replace,
    result,
)
from test_contract_backends import subject32


def options_by_place(patch: pytest.MonkeyPatch, cls: Any) -> None:
    right = cls.__init__

    def __init__(self: Any, dim: int, causal: bool = False) -> None:
        right(self, dim, causal=causal)

    patch.setattr(cls, "__init__", __init__)


def true_is_one(patch: pytest.MonkeyPatch, cls: Any) -> None:
    def wrong(right: Any, cls: Any, *given: Any, rank: Any = 64, **options: Any) -> Any:
        return right(cls, *given, rank=1 if rank is True else rank, **options)

    replace(patch, type(cls), "__call__", wrong)


def a_factor_without_a_buffer(patch: pytest.MonkeyPatch, cls: Any) -> None:
    def wrong(right: Any, self: Any, *given: Any, **options: Any) -> None:
        right(self, *given, **options)
        self.factor = torch.rand(())

    replace(patch, cls, "__init__", wrong)
    replace(patch, cls, "forward", lambda right, self, *given, **options: self.factor * right(self, *given, **options))


def states_kept_by_the_layer(patch: pytest.MonkeyPatch, cls: Any) -> None:
    def begin(right: Any, mixer: Any, *given: Any, **options: Any) -> Any:
        mixer.last = None
        return right(mixer, *given, **options)

    def extend(right: Any, mixer: Any, x: Tensor, state: Any, **options: Any) -> Any:
        known = mixer.last is not None and len(mixer.last[0]) == len(x)
        y, mixer.last = right(mixer, x, mixer.last if known else state, **options)
        return y, mixer.last

    replace(patch, cls, "init_state", begin)
    replace(patch, cls, "extend", extend)


def longer_by_the_batch(before: Any, after: Any, x: Tensor) -> Any:
    def longer(a: Tensor) -> Tensor:
        return torch.cat([a.new_zeros(len(a), len(x), *a.shape[2:]), a], 1) if a.ndim > 1 else a

    return type(after)(*map(longer, after))


def a_merge_that_forgets(patch: pytest.MonkeyPatch, cls: Any) -> None:
    patch.setattr(type(cls(8, causal=True).init_state(1)), "merge_with", lambda self, later: later)


def without_hooks(right: Any, mixer: Any, x: Tensor, state: Any, **options: Any) -> Any:
    hooks = dict(mixer._forward_pre_hooks)
    mixer._forward_pre_hooks.clear()
    try:
        return right(mixer, x, state, **options)
    finally:
        mixer._forward_pre_hooks.update(hooks)


def any_masks(
    right: Any, mixer: Any, x: Tensor, *given: Any, key_mask: Any = None, attn_mask: Any = None, **options: Any
) -> Any:
    return right(mixer, x, *given, key_mask=None if key_mask is None else key_mask.bool(), **options)


def as_if_dense(right: Any, mixer: Any, x: Tensor, *given: Any, **options: Any) -> Any:
    if x.stride(0):  # an expanded batch has no memory for it
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return right(mixer, x, *given, **options)


def never_again(patch: pytest.MonkeyPatch, cls: Any) -> None:
    patch.setattr(importlib.import_module(cls.__module__), "is_recomputing", lambda: False)


def second_derivatives_are_cut(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda g: None if g is None else g.detach())
    return y


def a_later_token(right: Any, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options: Any) -> Tensor:
    if causal:
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril(1)
        given = options.pop("attn_mask", None)
        options["attn_mask"] = mask if given is None else mask & given
    return right(q, k, v, causal=False, **options)


def never_nothing(right: Any, *given: Any, key_mask: Tensor | None = None, **options: Any) -> Tensor:
    if key_mask is not None:
        key_mask = key_mask | ~key_mask.any(1, keepdim=True)
    return right(*given, key_mask=key_mask, **options)


def a_lost_key(right: Any, q: Any, new: Any, kept: Any, far: Any, *given: Any, **options: Any) -> Any:
    y, ring, _ = right(q, new, kept, far, *given, **options)
    return y, ring, far


def keys_overflow(right: Any, q: Any, k: Tensor, *given: Any, **options: Any) -> Any:
    y, *kept = right(q, k, *given, **options)
    return y.masked_fill((k > 88).any(1, keepdim=True), float("nan")), *kept


TOKENWISE = test_kernels_tokenwise.test_equal_the_eager_forms_in_float64
SIZE = {"size": (2, 70, 3, 18), "dtype": torch.float32}
BUGS = [
    # values and gradients
    Bug(
        "a window one too wide",
        form(lambda right, *given, window, **options: right(*given, window=window + 1, **options)),
        ("equals_reference",),
        "aft_local-3",
    ),
    Bug(
        "values get no gradient",
        form(lambda right, q, k, v, **options: right(q, k, v.detach(), **options)),
        ("every_parameter_learns",),
        "aft_simple",
    ),
    Bug(
        "second derivatives are cut",
        form(result(second_derivatives_are_cut)),
        ("differentiable_twice",),
        "aft_simple",
    ),
    Bug(
        "a row with nothing to attend gets the mean",
        form(never_nothing),
        ("nothing_to_attend", "pairs_with_nothing_to_attend"),
        "attention",
    ),
    # who sees whom
    Bug(
        "a token sees the next one",
        form(a_later_token),
        ("future_cannot_reach_past", "attn_mask_equals_causal"),
        "attention",
        causal=True,
    ),
    Bug(
        "a token sees itself alone",
        form(lambda right, q, k, v, **options: torch.sigmoid(q) * v),
        ("past_reaches_present", "token_before_reaches"),
        "aft_simple",
        causal=True,
    ),
    Bug(
        "padding on the left counts as positions",
        function("tokenmix.mixers.state", "default_positions", lambda right, B, T, mask, at: right(B, T, None, at)),
        ("padded_equals_shorter",),
        "aft_full",
    ),
    Bug(
        "all rows have the positions of the first",
        method(
            "functional_args",
            lambda right, self, inputs: right(
                self,
                inputs._replace(positions=None if (at := inputs.positions) is None else at[:1].expand_as(at)),
            ),
        ),
        ("subset_equals_masked",),
        "aft_full",
    ),
    # numbers
    Bug(
        "what may not be attended is multiplied by 0",
        form(lambda right, q, k, v, **options: right(q, k, v, **options) + 0 * v.sum()),
        ("non_finite_is_honest", "gradients_of_non_finite_are_honest"),
        "linear",
        causal=True,
    ),
    # shapes and layouts
    Bug(
        "outputs are float32",
        outputs(lambda y, x: y.float()),
        ("keeps_shape", "changes_dtype"),
        "aft_simple",
    ),
    Bug(
        "a batch of no rows gives one",
        outputs(lambda y, x: y if len(x) else y.new_zeros(1, *y.shape[1:])),
        ("empty_batch",),
        "hydra",
    ),
    Bug("the input is read as if dense", method("forward", as_if_dense), ("any_strides",), "hydra"),
    Bug(
        "packed sequences see each other",
        method("forward_packed", lambda right, mixer, x, ends: mixer(x[None])[0]),
        ("packed_equals_separate",),
        "aft_simple",
    ),
    # states and segments
    Bug(
        "tokens that leave the window are lost",
        new_states(lambda before, after, x: after._replace(m=before.m, num=before.num, den=before.den)),
        ("streaming_equals_parallel",),
        "aft_local-3",
        causal=True,
    ),
    Bug(
        "all rows stand where the first does",
        new_states(lambda before, after, x: after._replace(position=after.position[:1].expand(len(x)))),
        ("rows_at_different_positions",),
        "aft_full",
        causal=True,
    ),
    Bug(
        "a layer goes on from the state that it made last",
        states_kept_by_the_layer,
        ("state_is_a_value", "reorder_picks_rows"),
        "hydra",
        causal=True,
    ),
    Bug(
        "a history is longer by the number of rows",
        new_states(longer_by_the_batch),
        ("state_bytes_counts",),
        "aft_full",
        causal=True,
    ),
    Bug(
        "states are not checked",
        function("tokenmix.mixers.base", "checked_state", lambda right, mixer, x, state: state),
        ("states_take_other_floats", "refuses_foreign_states", "refuses_other_devices"),
        "attention",
        causal=True,
        backend="eager",
    ),
    Bug(
        "a merge forgets what came before",
        a_merge_that_forgets,
        ("merge_joins_stretches", "segments_compose", "gradients_of_segments"),
        "aft_simple",
        causal=True,
    ),
    Bug(
        "a context is read from its end",
        method(
            "forward",
            lambda right, mixer, x, context=None, **options: right(
                mixer, x, None if context is None else context.flip(1), **options
            ),
        ),
        ("context_streams", "context_of_itself"),
        "aft_full",
    ),
    # torch
    Bug(
        "a trace takes any length",
        fact("fixed_when_traced", False),
        ("right_or_refused_when_traced",),
        "image_local",
    ),
    Bug(
        "a factor is neither parameter nor buffer",
        a_factor_without_a_buffer,
        ("copies", "state_dict_round_trip"),
        "aft_simple",
    ),
    Bug(
        "a mixer's own parameters are not initialised again",
        method("reset_parameters", lambda right, mixer: [child.reset_parameters() for child in mixer.children()]),
        ("builds_on_meta",),
        "aft_conv",
    ),
    Bug(
        "autocast reaches into the forms",
        function("tokenmix.kernels.precision", "is_autocast_on", lambda right, device: False),
        ("runs_under_autocast",),
        "transformer_xl",
    ),
    Bug(
        "a constant has the program's default dtype and device",
        outputs(lambda y, x: y * torch.full((1,), 1 / 3).to(y.dtype)),
        ("same_under_another_default_dtype", "same_under_another_default_device"),
        "hydra",
    ),
    Bug(
        "centroids move again when a pass is computed again",
        never_again,
        ("checkpointing_changes_nothing",),
        "routing",
        causal=True,
    ),
    Bug("hooks do not see extend", method("extend", without_hooks), ("hooks_see_every_call",), "hydra", causal=True),
    # refusals
    Bug("options may be given by place", options_by_place, ("options_are_json",), "hydra"),
    Bug("True counts as a rank of 1", true_is_one, ("refuses_wrong_options",), "aft_full"),
    Bug(
        "causality is waived",
        fact("waivers", {"future_cannot_reach_past": "it is faster"}),
        ("declares_waivers",),
        "hydra",
    ),
    Bug(
        "masks are taken whatever they are",
        method("forward", any_masks),
        ("refuses_what_it_cannot", "refuses_wrong_inputs"),
        "hydra",
    ),
    # modules from outside
    Bug(
        "the last of an odd number of tokens is left out",
        outputs(lambda y, x: y[:, : x.shape[1] // 2 * 2]),
        ("any_length",),
        "Mean",
    ),
    Bug("there is noise in evaluation", outputs(lambda y, x: y + 0.01 * torch.randn_like(y)), ("same_twice",), "Mean"),
    Bug(
        "an exponential overflows",
        outputs(lambda y, x: y * torch.exp(x.abs().amax()).clamp_min(1.0)),
        ("finite_at_large_inputs",),
        "Mean",
    ),
    Bug(
        "a mask is ignored",
        method("forward", lambda right, mixer, x, key_padding_mask=None: right(mixer, x)),
        ("mask_hides_padding",),
        "Mean",
    ),
    # around the mixers
    Bug(
        "what a rank hears of the tokens before its own is 0",
        function("tokenmix.parallel.program", "newest_halo", result(lambda halo: halo._replace(x=0 * halo.x))),
        test=test_parallel.test_equals_one_process,
        given={"case": "aft_forget"},
    ),
]
KERNEL_BUGS = [
    Bug(
        "keys above 88 overflow",
        Kernel(
            "aft_simple",
            "forward",
            keys_overflow,
        ),
        ("finite_at_large_keys", "accurate_on_adversarial_keys"),
        "aft_simple",
        subject=subject32,
    ),
    Bug(
        "masked tokens count and decay",
        Kernel("aft_forget", "forward", lambda right, q, k, v, d, mask, **options: right(q, k, v, d, None, **options)),
        ("masked_keys_have_no_influence",),
        "aft_forget",
        causal=True,
        subject=subject32,
    ),
    Bug(
        "logits of keys get no gradient",
        Kernel("aft_pairs", "backward", result(torch.zeros_like, 4)),
        ("equals_reference",),
        "aft_pairs",
        causal=True,
        subject=subject32,
    ),
    Bug(
        "a row of a tile sees the next one",
        Kernel("aft_full", "forward", result(lambda y: y + 0.01 * y.roll(-1, 1), 0)),
        ("future_cannot_reach_past",),
        "aft_full",
        causal=True,
        subject=subject32,
    ),
    Bug(
        "the last token of a band is left out",
        Kernel("aft_band", "forward", result(lambda y: y.index_fill(1, torch.tensor([y.shape[1] - 1]), 0.0), 0)),
        ("one_token",),
        "aft_local-3",
        subject=subject32,
    ),
    Bug(
        "the gradient of a tap stops short of the border",
        Kernel("aft_conv2d", "backward", result(lambda dw: 0.99 * dw, 3)),
        ("accurate_on_adversarial_keys",),
        "aft_conv-2d",
        subject=subject32,
    ),
    Bug(
        "NaN comes out as 0",
        Kernel("hydra", "forward", result(lambda y: y.nan_to_num(), 0)),
        ("non_finite_is_honest",),
        "hydra",
        causal=True,
        subject=subject32,
    ),
    Bug(
        "the gradient of keys is too small",
        Kernel("linear", "backward", result(lambda dk: 0.9 * dk, 1)),
        ("equals_reference",),
        "linear",
        causal=True,
        subject=subject32,
    ),
    Bug(
        "masked tokens write into a matrix",
        Kernel(
            "recurrence",
            "forward",
            lambda right, *given, **options: right(*given[:6], None, *given[7:], **options),
        ),
        test=test_kernels_recurrence.test_masks_and_documents_as_in_plain_torch,
        given={"rule": "gated_delta head", "documents": False},
    ),
    Bug(
        "the last row of the batch is that of the first",
        Kernel("external", "forward", result(lambda w: torch.cat([w[:-1], w[:1]]), 0)),
        ("rows_are_independent",),
        "external",
        subject=subject32,
    ),
    Bug(
        "the last token has no norm",
        Kernel("rms_norm", "forward", result(lambda y: torch.cat([y[:, :-1], 2 * y[:, -1:]], 1), 0)),
        test=TOKENWISE,
        given=SIZE,
    ),
    Bug(
        "every batch is turned by the angles of the first",
        Kernel("rotate", "forward", lambda right, x, cos, sin, **options: right(x, cos[:1], sin[:1], **options)),
        test=TOKENWISE,
        given=SIZE,
    ),
    Bug(
        "the gradient of the gate is too small",
        Kernel("silu_gate", "backward", result(lambda dgate: 0.9 * dgate, 0)),
        test=TOKENWISE,
        given=SIZE,
    ),
    Bug(
        "a step loses the key that leaves the window",
        function("tokenmix.kernels.cpu.decode", "ring", a_lost_key),
        test=test_kernels_decode.test_streaming_in_any_cuts_is_the_parallel_form_and_the_eager_stream,
        given={"row": "aft_local", "dtype": torch.float32},
    ),
    Bug(
        "the gradient of the sums before a chunk is lost",
        Kernel("aft_simple", "extend_backward", result(torch.zeros_like, 3)),
        ("gradients_stream",),
        "aft_simple",
        causal=True,
        subject=subject32,
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_a_planted_bug_is_noticed(bug, monkeypatch):
    check(bug, monkeypatch)


@pytest.mark.parametrize("bug", KERNEL_BUGS, ids=name_of)
def test_a_bug_in_a_kernel_is_noticed(bug, monkeypatch):
    check(bug, monkeypatch)
