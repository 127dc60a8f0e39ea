"""Plant bugs in what needs more than torch, and count those of all files: every promise and every kernel has one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import huggingface_checks
import test_sanitizers
import test_segmentation_training
import test_surgery
from planted_bugs import Bug, Kernel, check, form, function, name_of, replace, result
from test_planted_bugs import BUGS, KERNEL_BUGS
from tokenmix.hosts.huggingface.cache import TokenMixStateLayer
from tokenmix.hosts.surgery import adapters, masks, probe
from tokenmix.kernels.operator import OPERATORS
from tokenmix.testing import PLAIN_PROMISES, PROMISES


def hosts_without_masks(patch: pytest.MonkeyPatch, cls: Any) -> None:
    patch.setattr(adapters, "read_mask", lambda *given, **options: masks.Read(None, None))
    patch.setattr(probe.Proofs, "prove", lambda self, site: None)  # which would notice it first


def halved_caches(patch: pytest.MonkeyPatch, cls: Any) -> None:
    def wrong(right: Any, self: Any, state: Any, *given: Any, **options: Any) -> None:
        right(self, type(state)(*(a / 2 if a.is_floating_point() else a for a in state)), *given, **options)

    replace(patch, TokenMixStateLayer, "store", wrong)


def ignored_targets_count(right: Any, logits: Tensor, targets: Tensor, *given: Any, **options: Any) -> Tensor:
    return right(logits, targets.clamp_min(0), *given, **options)


EXTRA_BUGS = [
    Bug(
        "compiled code computes something else",
        form(result(lambda y: y * 1.01 if torch.compiler.is_compiling() else y)),
        ("compiles", "exports", "exports_to_onnx"),
        "aft_simple",
    ),
    Bug(
        "a cache holds half of the state",
        halved_caches,
        test=huggingface_checks.streamed_equals_full,
        given={"kind": "hydra"},
    ),
    Bug(
        "the masks of a host are dropped",
        hosts_without_masks,
        test=test_surgery.test_softmax_into_softmax_changes_nothing,
        given={"name": "bert"},
    ),
    Bug(
        "targets to be ignored are learned",
        function("torch.nn.functional", "cross_entropy", ignored_targets_count),
        test=test_segmentation_training.test_the_loss_is_the_mean_over_pixels_with_a_class,
    ),
]
EVERY = [*BUGS, *KERNEL_BUGS, *EXTRA_BUGS]


@pytest.mark.parametrize("bug", EXTRA_BUGS, ids=name_of)
def test_a_planted_bug_is_noticed(bug, monkeypatch):
    check(bug, monkeypatch)


def test_every_promise_has_a_bug():
    noticed = {promise for bug in EVERY for promise in bug.promises}
    assert noticed == PROMISES.keys() | PLAIN_PROMISES.keys()


def test_every_kernel_has_a_bug():
    planted = {bug.plant.name for bug in KERNEL_BUGS if isinstance(bug.plant, Kernel)}
    assert planted == {name for name, operator in OPERATORS.items() if "cpu" in operator.on}


def test_bugs_are_few_and_each_has_a_name():
    names = [*(bug.name for bug in EVERY), *test_sanitizers.PLANTED]
    assert len(set(names)) == len(names) <= 60
