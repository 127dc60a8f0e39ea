"""Test that what a ``with`` block sets holds for its own thread or task, and for the backward pass of its results."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tokenmix import MixerError, aux_losses, build_mixer, functional, kernels, use_backend
from tokenmix.kernels import fast_linear as routes
from tokenmix.kernels.backend import choose, default_backend
from tokenmix.mixers.parts.aux_losses import add_aux_loss
from tokenmix.models import Block
from tokenmix.system import modules


def in_turns(*steps: Callable[[], Any]) -> None:
    """Run each of these generators in a thread of its own, step by step in turns."""
    going, done = [step() for step in steps], object()
    pools = [ThreadPoolExecutor(1) for _ in going]
    left = list(range(len(going)))
    while left:
        for i in tuple(left):
            if pools[i].submit(next, going[i], done).result(60) is done:
                left.remove(i)
    for pool in pools:
        pool.shutdown()


def holding(block, read, mine, *, steps: int):
    """A generator that holds a block open for some steps, and in each finds its own value."""
    with block:
        for _ in range(steps):
            assert read() == mine
            yield


def overlapping(blocks, read, values) -> None:
    """The first block ends while the second is still open."""
    in_turns(
        *(partial(holding, block, read, value, steps=n) for block, value, n in zip(blocks, values, (2, 4), strict=True))
    )


def test_backends_of_two_threads():
    outer = default_backend()
    overlapping((use_backend("eager"), use_backend("auto")), default_backend, ("eager", "auto"))
    assert default_backend() == outer


def test_a_block_says_nothing_to_a_thread_begun_inside_it():
    seen = []
    with use_backend("eager"):
        thread = threading.Thread(target=lambda: seen.append(default_backend()))
        thread.start()
        thread.join()
    assert seen == [kernels.backend._default]


def test_backends_of_two_tasks():
    async def hold(name: str, steps: int) -> None:
        with use_backend(name):
            for _ in range(steps):
                await asyncio.sleep(0)
                assert default_backend() == name

    async def both() -> None:
        await asyncio.gather(hold("eager", 2), hold("auto", 4))

    asyncio.run(both())
    assert default_backend() == kernels.backend._default


@pytest.mark.parametrize("first", [0, 1])
def test_blocks_of_generators_end_in_any_order(first):
    def hold(name):
        with use_backend(name), aux_losses() as losses:
            yield losses

    held = [hold("eager"), hold("auto")]
    for each in held:
        next(each)
    held[first].close()
    assert default_backend() == ("auto", "eager")[first]
    held[1 - first].close()
    assert default_backend() == kernels.backend._default
    assert kernels.backend._traced.backend is None
    add_aux_loss("none", lambda: pytest.fail("no block is open"))


def test_an_exception_ends_the_block():
    with pytest.raises(KeyError), use_backend("eager"):
        raise KeyError
    with pytest.raises(MixerError, match="unknown"), use_backend("fast"):
        pass
    assert default_backend() == kernels.backend._default


def test_compiled_functions_guard_on_the_block_of_their_thread():
    torch._dynamo.reset()
    made = []

    def backend(graph, _):
        made.append("auto")
        return graph.forward

    def run(x):
        return x + 1 if choose("test", "auto", x, on=("fused",)) == "fused" else x * 2

    def inside(x):
        with use_backend("eager"):
            return run(x)

    fast, fast_inside = (torch.compile(f, fullgraph=True, backend=backend) for f in (run, inside))
    x = torch.full((3,), 5.0)

    def calls(names):
        for name, want in names:
            with use_backend(name):
                assert float(fast(x)[0]) == want
                yield
                assert float(fast(x)[0]) == want
            assert float(fast(x)[0]) == 6
            assert float(fast_inside(x)[0]) == 10
            assert float(fast(x)[0]) == 6

    in_turns(partial(calls, [("eager", 10), ("auto", 6)]), partial(calls, [("auto", 6), ("eager", 10)]))
    assert len(made) <= 4  # both ways of one, and of the other what its own block says
    torch._dynamo.reset()


def test_aux_losses_of_two_threads():
    def collect(value: float, steps: int):
        with aux_losses() as losses:
            for _ in range(steps):
                add_aux_loss("x", lambda: torch.tensor(value))
                yield
        assert [float(a) for a in losses.values()] == [value] * steps

    in_turns(partial(collect, 1.0, 2), partial(collect, 2.0, 4))


def test_typed_names_of_two_threads():
    def ask(steps: int):
        with modules.typed_names():
            for _ in range(steps):
                assert modules._names.typed
                yield
        assert not modules._names.typed

    in_turns(partial(ask, 2), partial(ask, 4))
    assert not modules._names.typed


def test_fast_linear_of_two_threads_leaves_torch_as_it_was(monkeypatch):
    """Its setting is the process's: it must be what it was, whichever block ends first."""

    class Setting:
        fp32_precision = "none"

    def found(_, usual, *__):
        return routes.LinearRoutes(1.0, 2.0, 0.0, 0.0, "oneDNN", "")

    monkeypatch.setattr(routes, "_matmul_setting", lambda: Setting)
    monkeypatch.setattr(routes, "_try", found)
    overlapping((routes.fast_linear(), routes.fast_linear()), lambda: Setting.fp32_precision, ("bf16", "bf16"))
    assert Setting.fp32_precision == "none"
    with routes.fast_linear(), routes.fast_linear():
        pass
    assert (Setting.fp32_precision, routes._routes) == ("none", [])


MODULES = {
    "aft_simple": lambda: build_mixer("aft_simple", 8, causal=True),
    "attention with a bias, its queries in groups": lambda: build_mixer(
        "attention", 8, heads=2, causal=True, bias={"name": "kerple"}
    ),
    "hydra": lambda: build_mixer("hydra", 8),
    "a block with rms norms": lambda: Block(
        8,
        {"name": "attention", "heads": 2, "positions": {"name": "rotary"}, "qk_norm": "rms"},
        norm_type="rms",
        max_len=32,
        causal=True,
    ),
}


def chosen(monkeypatch) -> list[tuple[str, str]]:
    """Record what every call of ``choose`` says, in the order of the calls."""
    import sys

    said: list[tuple[str, str]] = []

    def noted(who, *args, **options):
        said.append((who, choose(who, *args, **options)))
        return said[-1][1]

    for name, module in list(sys.modules.items()):
        if name.startswith("tokenmix.") and vars(module).get("choose") is choose:
            monkeypatch.setattr(module, "choose", noted)
    return said


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_pass_computed_again_takes_the_paths_of_the_first(name, reentrant, elsewhere, monkeypatch):
    """After the block ended, inside another one, and in another thread."""
    torch.manual_seed(0)
    module, x = MODULES[name](), torch.randn(2, 600 if "groups" in name else 20, 8, requires_grad=True)
    said = chosen(monkeypatch)
    with use_backend("eager"):
        y = checkpoint(module, x, use_reentrant=reentrant)
    assert said
    first = len(said)

    def backward() -> None:
        with use_backend("auto"):
            y.square().sum().backward()

    if elsewhere:
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    else:
        backward()
    assert x.grad is not None
    assert len(said) > first
    assert {path for _, path in said} == {"eager"}


def test_own_checkpoints_keep_their_block(monkeypatch):
    """Attention with a bias computes the weights of each group of queries again in the backward pass."""
    said = chosen(monkeypatch)
    q = torch.randn(1, 600, 8, requires_grad=True)
    with use_backend("eager"):
        y = functional.attention(q, q, q, lambda start, stop: torch.zeros(1, 1, stop - start, 600), heads=2)
    first = len(said)
    y.sum().backward()
    assert len(said) > first
    assert {path for _, path in said} == {"eager"}
    with use_backend("eager"):
        (grad,) = torch.autograd.grad(
            functional.attention(q, q, q, lambda a, b: torch.zeros(1, 1, b - a, 600), heads=2).sum(),
            q,
            create_graph=True,
        )
    grad.square().sum().backward()
    assert {path for _, path in said} == {"eager"}
