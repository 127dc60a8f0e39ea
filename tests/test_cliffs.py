"""Test that `auto` takes the path that suits the shapes.

One key, heads of one feature, heads wider than their tokens are many.
"""

from __future__ import annotations

import json

import pytest
import torch

import cliffs
from tokenmix import functional
from tokenmix.functional import linear
from tokenmix.functional.sums import features as sums
from tokenmix.lab.bench.correctness import _Seen
from tokenmix.lab.bench.roofline import machine
from tokenmix.system.machine import torch_threads

PATHS = {
    "linear, one token": set(),
    "linear, one token, causal": set(),
    "linear, 16 tokens": {"tokenmix::linear"},
    "linear, one token, one wide head": set(),
    "linear, heads of one feature": {"tokenmix::aft_simple"},
    "linear, heads of one feature, causal": {"tokenmix::aft_simple"},
    "linear, heads of one feature, long": {"tokenmix::aft_simple"},
    "linear, one wide head": set(),
    "linear, ordinary heads": {"tokenmix::linear"},
    "aft_full, one token": set(),
    "aft_full, two tokens": set(),
    "aft_full, 8 tokens": {"tokenmix::aft_full"},
    "aft_conv 31, a filter per feature, causal": {"tokenmix::aft_band"},
}
NEVER = -torch.finfo(torch.float32).max


def kernels_of(call) -> set[str]:
    with torch.no_grad(), _Seen() as seen:
        call()
    return {name for name in seen.names if name.startswith("tokenmix::")}


@pytest.mark.parametrize("title", cliffs.ROWS)
def test_auto_takes_the_faster_path_by_the_shapes_alone(title):
    _, call = cliffs.row(*cliffs.ROWS[title])
    assert kernels_of(lambda: call("auto")) == PATHS[title]


def test_a_kernel_asked_for_by_name_runs_at_every_shape():
    for title in ("linear, one token", "linear, heads of one feature", "aft_full, one token"):
        _, call = cliffs.row(*cliffs.ROWS[title])
        assert len(kernels_of(lambda call=call: call("cpu"))) == 1, title


def spoiled(a: torch.Tensor, what: str) -> torch.Tensor:
    a = a.clone()
    a[0, 0, 0] = {"inf": float("inf"), "nan": float("nan"), "dead": NEVER}.get(what, a[0, 0, 0])
    return a


@pytest.mark.parametrize(
    ("T", "S", "e", "causal"),
    [(1, 1, 4, True), (3, 1, 4, False), (6, 6, 1, False), (6, 6, 1, True), (2, 2, 64, True), (2, 3, 64, False)],
)
@pytest.mark.parametrize("feature", ["elu", "exp", "softmax"])
@pytest.mark.parametrize("what", ["plain", "masked", "k inf", "k nan", "k dead", "q nan", "v nan"])
def test_short_forms_of_linear_attention_are_the_sums_of_the_paper(T, S, e, causal, feature, what):
    torch.manual_seed(0)
    q, k, v = (
        spoiled(torch.randn(2, n, 2 * e), what[2:] if what[:2] == f"{name} " else "")
        for name, n in (("q", T), ("k", S), ("v", S))
    )
    mask = torch.tensor([[False] * S, [True] * S]) if what == "masked" else None
    a, (b, v1) = linear.log_queries(q, 2, feature), linear.log_keys(k, v, 2, feature, mask)
    want = sums.joined_heads(sums.causal_read(a, b, v1)[0] if causal else sums.read(a, sums.over_keys(b, v1)), q)
    got = functional.linear_attention(q, k, v, heads=2, feature=feature, causal=causal, key_mask=mask, backend="eager")
    there = got.isfinite()
    assert not there[~want.isfinite()].any()
    assert there[want.isfinite().flatten(1).all(1)].all(), "a bad token spoils its own row of the batch only"
    assert torch.allclose(got[there], want[there], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("what", ["plain", "masked", "k inf", "k nan", "k dead", "v nan", "w nan", "w -inf"])
def test_aft_full_over_one_key_is_aft_full_over_two_of_which_one_is_masked(what):
    torch.manual_seed(0)
    q, k, v, w = torch.randn(2, 3, 4), torch.randn(2, 1, 4), torch.randn(2, 1, 4), torch.randn(2, 3, 1)
    k, v = (spoiled(a, what[2:] if what[:2] == f"{name} " else "") for name, a in (("k", k), ("v", v)))
    if what[0] == "w":
        w[0, 0] = float(what[2:])
    mask = torch.tensor([[what != "masked"], [True]])
    two = (torch.cat([a, torch.zeros_like(a)], 1) for a in (k, v))
    both = functional.aft_full(
        q, *two, torch.cat([w, w], 2), key_mask=torch.cat([mask, torch.zeros_like(mask)], 1), backend="eager"
    )
    one = functional.aft_full(q, k, v, w, key_mask=mask if what == "masked" else None)
    if what == "w nan":  # there the masked key's weight is one too
        assert one[0, 0].isnan().all()
        assert both[0, 0].isnan().all()
        one, both = one[1], both[1]
    assert torch.allclose(one, both, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_short_forms_have_the_gradients_of_the_long_ones():
    torch.manual_seed(0)
    for T, S, e, causal in ((3, 1, 2, False), (4, 4, 1, True), (3, 3, 30, True), (3, 4, 30, False)):
        q, k, v = (torch.randn(1, n, 2 * e, dtype=torch.float64, requires_grad=True) for n in (T, S, S))

        def short(q, k, v, causal=causal):
            return functional.linear_attention(q, k, v, heads=2, causal=causal)

        def long(q, k, v, causal=causal):
            a, (b, v1) = linear.log_queries(q, 2, "elu"), linear.log_keys(k, v, 2, "elu", None)
            return sums.joined_heads(
                sums.causal_read(a, b, v1)[0] if causal else sums.read(a, sums.over_keys(b, v1)), q
            )

        g = torch.randn_like(q)
        for ours, theirs in zip(
            torch.autograd.grad(short(q, k, v), (q, k, v), g),
            torch.autograd.grad(long(q, k, v), (q, k, v), g),
            strict=True,
        ):
            assert float((ours - theirs).abs().max()) <= 1e-12
    q, k, v, w = (
        torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 2), (2, 1, 2), (2, 1, 2), (3, 1))
    )
    assert torch.autograd.gradcheck(functional.aft_full, (q, k, v, w))


def test_a_part_measured_alone_leaves_the_others_in_the_record(monkeypatch, tmp_path, capsys):
    record = tmp_path / "cliffs.json"
    record.write_text(json.dumps({"machine": {"device": machine()["device"]}, "rows": ["kept"], "grid": ["kept too"]}))

    def compare(cell, *_):
        return {**cell._asdict(), **dict.fromkeys(cliffs.BACKENDS, 1.0), "share_of_better": 1.0}

    for name, value in {"RECORD": record, "compare": compare, "check_equal": lambda _: None}.items():
        monkeypatch.setattr(cliffs, name, value)
    monkeypatch.setattr("sys.argv", ["cliffs", "--parts", "half", "--record"])
    with torch_threads(torch.get_num_threads()):
        assert cliffs.main() == 0
    found = json.loads(record.read_text())
    assert (found["rows"], found["grid"]) == (["kept"], ["kept too"])
    assert {(cell["op"], cell["dtype"]) for cell in found["half"]} == {("aft_full", "bfloat16")}
    assert {tuple(cell["sizes"])[1] for cell in found["half"]} == {1024, 4096}
    record.write_text(json.dumps({"machine": {"device": "another"}}))
    with pytest.raises(SystemExit, match="another machine"), torch_threads(torch.get_num_threads()):
        cliffs.main()
