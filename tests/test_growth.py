"""Histories that grow in place: no tensor ever changes, and few are copied."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch

from tokenmix import build_mixer
from tokenmix.functional.layout import growth
from tokenmix.functional.layout.growth import append_tokens
from tokenmix.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.available(), reason="grows where the C kernels run")


@pytest.fixture(autouse=True)
def grow_from_the_eighth_token(monkeypatch):
    monkeypatch.setattr(growth, "LEAST", 8)


def grow_tensor(tokens: int = 16, rows: int = 1):
    """Return a tensor in memory for more, and a copy of it."""
    a = append_tokens(torch.randn(rows, tokens - 1, 3), torch.randn(rows, 1, 3))
    return a, a.clone()


def test_appending_writes_behind_a_tensor_and_changes_none():
    a, kept = grow_tensor()
    more = [torch.randn(1, 1, 3) for _ in range(3)]
    b = append_tokens(a, more[0])
    c = append_tokens(a, more[1])  # a has been appended to
    d = append_tokens(b, more[2])
    assert b.data_ptr() == a.data_ptr()
    assert c.data_ptr() != a.data_ptr()
    assert torch.equal(a, kept)
    for found, parts in ((b, more[:1]), (c, more[1:2]), (d, [more[0], more[2]])):
        assert torch.equal(found, torch.cat([kept, *parts], 1))


def test_a_long_history_is_seldom_copied():
    a, places = grow_tensor()[0], set()
    for _ in range(200):
        a = append_tokens(a, torch.randn(1, 1, 3))
        places.add(a.data_ptr())
    assert a.shape == (1, 216, 3)
    assert len(places) <= 24  # by an eighth each


def test_what_a_graph_saved_is_not_taken_for_changed():
    a, kept = grow_tensor()
    x = torch.ones(1, 16, 3, requires_grad=True)
    y = (x * a).sum()
    with torch.no_grad():
        append_tokens(a, torch.randn(1, 1, 3))
    y.backward()
    assert torch.equal(x.grad, kept)


def test_gradients_rows_and_other_dtypes_are_copied():
    a, _ = grow_tensor()
    b = torch.randn(1, 1, 3, requires_grad=True)
    assert append_tokens(a, b).requires_grad
    wide, _ = grow_tensor(rows=2)
    for old, new in ((wide, wide[:, :1]), (a.double(), a[:, :1].double()), (a > 0, a[:, :1] > 0)):
        assert torch.equal(append_tokens(old, new), torch.cat([old, new], 1))


def test_inference_mode_and_the_world_outside_of_it():
    with torch.inference_mode():
        a, kept = grow_tensor()
        a = append_tokens(a, kept[:, :1])
    b = append_tokens(a, kept[:, :1])
    assert torch.equal(b, torch.cat([kept, kept[:, :1], kept[:, :1]], 1))


def test_threads_that_go_on_from_one_tensor_write_to_memory_of_their_own():
    a, kept = grow_tensor(tokens=64)
    start, found = threading.Barrier(8), {}

    def run(n):
        start.wait()
        b = a
        for _ in range(4):
            b = append_tokens(b, torch.full((1, 1, 3), float(n)))
        found[n] = b

    threads = [threading.Thread(target=run, args=(n,)) for n in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for n, b in found.items():
        assert torch.equal(b, torch.cat([kept, torch.full((1, 4, 3), float(n))], 1))


@torch.no_grad()
def test_a_stream_in_growing_memory_is_the_parallel_form_and_its_states_are_values():
    torch.manual_seed(0)
    mixer, x = build_mixer("aft_full", 6, max_len=80, causal=True).eval(), torch.randn(1, 80, 6)
    state, outputs, states = mixer.init_state(1), [], []
    for t in range(80):
        y, state = mixer.extend(x[:, t : t + 1], state)
        outputs.append(y)
        states.append((state, copy.deepcopy(state)))
    assert torch.allclose(torch.cat(outputs, 1), mixer(x), atol=1e-6)
    assert len({state.keys.data_ptr() for state, _ in states[20:]}) < 20
    again = mixer.extend(x[:, 40:41], states[39][0])[0]  # from the middle, another way on
    assert torch.allclose(again, outputs[40], atol=1e-6)
    for state, before in states:
        assert all(torch.equal(a, b) for a, b in zip(state, before, strict=True))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file)
    assert all(torch.equal(a, b) for a, b in zip(loaded, state, strict=True))
