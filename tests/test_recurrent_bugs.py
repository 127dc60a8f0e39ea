"""Bugs that layers with a gated recurrence have had elsewhere, planted here: each is noticed, and by which promise."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import test_recurrence
from planted_bugs import Bug, check, function, name_of
from tokenmix.functional.sums.gated_norm import gated_norm
from tokenmix.mixers.parts.recurrent import Recurrent

MODULES = [importlib.import_module(f"tokenmix.{name}") for name in ("functional.gated_delta", "contrib.mamba2")]


def read(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    decay: Tensor,
    beta: Tensor | None = None,
    past: Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    l2norm: bool = False,
    bug: str = "",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence token by token, with one bug, or with none."""
    H, (B, T), rank = v.shape[2], q.shape[:2], k.shape[3]
    q, k = (a * (a.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if l2norm else a for a in (q, k))
    group = H // k.shape[2]
    q, k = (a.repeat(1, 1, group, 1) if bug == "tiled" else a.repeat_interleave(group, 2) for a in (q, k))
    keep = torch.exp(decay if decay.ndim == 4 else decay[..., None])[..., None]
    live = (torch.ones(B, T, dtype=torch.bool) if key_mask is None else key_mask).view(B, T, 1, 1, 1)
    S, outputs = q.new_zeros(B, H, rank, v.shape[3]) if past is None else past, []
    for t in range(T):
        kept = torch.where(live[:, t], S * keep[:, t], S * keep[:, t] if bug == "masked" else S)
        answer = torch.einsum("bhkv,bhk->bhv", S if bug == "undecayed" else kept, k[:, t])
        new = v[:, t] if beta is None else beta[:, t, :, None] * (v[:, t] - answer)
        S = torch.where(live[:, t], kept + k[:, t, :, :, None] * new[..., None, :], kept)
        outputs.append(torch.einsum("bhkv,bhk->bhv", kept if bug == "exclusive" else S, q[:, t]))
    return torch.stack(outputs, 1) * (rank**-0.5 if scale is None else scale) * live[..., 0], S


def plant(patch: pytest.MonkeyPatch, _: Any, *, bug: str) -> None:
    """Replace the recurrence of both layers by the loop."""
    for module in MODULES:
        patch.setattr(module, "recurrence", partial(read, bug=bug))


def plant_order(patch: pytest.MonkeyPatch, _: Any) -> None:
    """Swap the norm and the gate."""

    def swap_order(*args: Any, gate_first: bool = False, **options: Any) -> Tensor:
        return gated_norm(*args, gate_first=not gate_first, **options)

    for module in MODULES:
        patch.setattr(module, "gated_norm", swap_order)


def plant_state(patch: pytest.MonkeyPatch, _: Any) -> None:
    """Keep the inputs of the convolution after the activation."""
    right = Recurrent._mix_piece

    def wrong(self: Any, *args: Any, **options: Any) -> Any:
        y, state = right(self, *args, **options)
        return y, state._replace(values=F.silu(state.values))

    patch.setattr(Recurrent, "_mix_piece", wrong)


BUGS = [
    Bug("read before the decay", partial(plant, bug="undecayed"), ("equals_reference",), "gated_delta", True),
    Bug("masked tokens decay", partial(plant, bug="masked"), ("equals_reference",), "gated_delta", True),
    Bug("masked tokens decay Mamba-2", partial(plant, bug="masked"), ("equals_reference",), "mamba2", True),
    Bug("a token does not read itself", partial(plant, bug="exclusive"), ("equals_reference",), "gated_delta", True),
    Bug("heads are tiled", partial(plant, bug="tiled"), ("equals_reference",), "gated_delta-grouped", True),
    Bug("groups are tiled", partial(plant, bug="tiled"), ("equals_reference",), "mamba2-groups", True),
    Bug("the gate comes before the norm", plant_order, ("equals_reference",), "gated_delta", True),
    Bug("the norm comes before the gate", plant_order, ("equals_reference",), "mamba2", True),
    Bug("the state is activated", plant_state, ("streaming_equals_parallel",), "gated_delta", True),
    Bug(
        "heads that share a key are tiled",
        function(
            "tokenmix.functional.recurrence",
            "_repeat",
            lambda right, a, heads, dim=2: torch.cat([a] * (heads // a.shape[dim]), dim),
        ),
        test=test_recurrence.test_groups_of_heads,
        given={"heads": (2, 2, 4)},
    ),
    Bug(
        "a key decays once too often",
        function("tokenmix.functional.recurrence", "_after", lambda right, g: right(g) + g),
        test=test_recurrence.test_equals_the_loop,
        given={"rule": "gated head", "T": 33},
    ),
]


@pytest.mark.parametrize("bug", BUGS, ids=name_of)
def test_the_suite_notices(bug, monkeypatch):
    check(bug, monkeypatch)


@pytest.mark.parametrize("case", ["gated_delta-grouped", "gated_delta-feature", "mamba2-groups"])
def test_the_loop_without_a_bug_is_right(case, monkeypatch):
    plant(monkeypatch, None, bug="")
    bug = Bug("none", plant, ("equals_reference", "streaming_equals_parallel"), case, True)
    assert set(bug.outcomes().values()) == {"kept"}
