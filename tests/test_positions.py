"""Test explicit positions of any kind.

A mixer is right with them, or refuses them with one MixerError, in forward and in a stream.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cases import CASES, GRIDS, forms
from tokenmix import MixerError, build_mixer
from tokenmix.testing import subject
from tokenmix.testing.equality import reference_value

WRONG = {
    "gaps": lambda T: torch.arange(T) + (torch.arange(T) > 3),
    "repeated": lambda T: torch.arange(T) // 2,
    "shuffled": lambda T: torch.randperm(T, generator=torch.Generator().manual_seed(0)),
    "falling": lambda T: torch.arange(T).flip(0),
    "negative": lambda T: torch.arange(T) - 3,
    "far": lambda T: torch.arange(T) * 3 + 5000,
}
ROWS = [pytest.param(case, causal, id=f"{case}-{'causal' if causal else 'both-ways'}") for case, causal in forms()]


def subject_of(case: str, causal: bool):
    grid, prefix = GRIDS.get(case, (None, 0))
    return subject(CASES[case][0], {**CASES[case][1], "causal": causal}, grid=grid, prefix=prefix)


def streamed(mixer, x: Tensor, cuts: tuple[int, ...], positions: Tensor, key_mask: Tensor) -> Tensor:
    state, outputs = mixer.init_state(len(x)), []
    for part, at, live in zip(*(a.split(list(cuts), 1) for a in (x, positions, key_mask)), strict=True):
        y, state = mixer.extend(part, state, positions=at, key_mask=live)
        outputs.append(y)
    return torch.cat(outputs, 1)


def answer(s, call: Callable[[], Tensor]) -> tuple[Tensor | None, str]:
    """The output, or None and the one error that names the mixer."""
    try:
        return call(), ""
    except MixerError as error:
        return None, str(error) if s.cls.__name__ in str(error) else pytest.fail(str(error))


def close(got: Tensor, want: Tensor, live: Tensor, what: str) -> None:
    assert float((got - want)[live].detach().abs().max()) < 1e-7, what


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(("case", "causal"), ROWS)
def test_right_or_refused(case, causal, kind):
    s = subject_of(case, causal)
    mixer, x, T = s.build(), s.x(), s.length
    positions, live = WRONG[kind](T).expand(2, T), torch.ones(2, T, dtype=torch.bool)
    y, why = answer(s, lambda: s.call(mixer, x, positions=positions))
    if y is None:
        assert kind not in ("gaps", "far") or "from" in why, (
            "rising positions are only refused beyond max_len or the grid"
        )
        return
    close(y, mixer.out_proj(reference_value(s, *s.args(mixer, x, positions=positions))), live, "forward")
    if (
        mixer.capabilities.streaming and case != "aft_local-1"
    ):  # its ring holds no token whose position could be compared with the next
        for cuts in ((T,), (1,) * T, (3, 2, T - 5)):
            z, why = answer(s, lambda cuts=cuts: streamed(mixer, x, cuts, positions, live))
            if z is None:
                assert kind not in ("gaps", "far"), why
            else:
                close(z, y, live, f"stream in {cuts}")


@pytest.mark.parametrize("garbage", [0, 9])
@pytest.mark.parametrize(("case", "causal"), ROWS)
def test_positions_of_masked_tokens_say_nothing(case, causal, garbage):
    """As hosts fill them: 0 in front, the last position behind, or whatever was there."""
    s = subject_of(case, causal)
    mixer, x, T = s.build(), s.x(), s.length
    every, mask = torch.arange(T).expand(2, T), torch.ones(2, T, dtype=torch.bool)
    mask[0, :3] = mask[0, 4] = mask[1, 4:6] = mask[1, -2:] = False
    want = s.call(mixer, x, positions=every, key_mask=mask)
    positions = torch.where(mask, every, min(garbage, T - 1))
    close(s.call(mixer, x, positions=positions, key_mask=mask), want, mask, "forward")
    if mixer.capabilities.streaming:
        for cuts in ((T,), (1,) * T, (4, 2, T - 6)):
            close(streamed(mixer, x, cuts, positions, mask), want, mask, f"stream in {cuts}")


def test_a_stream_refuses_to_step_back_and_says_where():
    mixer = build_mixer("local", 8, causal=True, heads=2, window=4)
    _, state = mixer.extend(torch.randn(2, 3, 8), mixer.init_state(2), positions=torch.tensor([[0, 1, 2], [4, 5, 6]]))
    with pytest.raises(
        MixerError,
        match=r"Local: positions of valid tokens must be 0 or above and rise along each row.*got 6, 7 in row 1",
    ):
        mixer.extend(torch.randn(2, 2, 8), state, positions=torch.tensor([[3, 4], [6, 7]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "case", ["aft_local-3", "aft_local-none", "aft_conv", "lightconv", "local", "memory_compressed", "axial"]
)
def test_a_ring_passes_masked_tokens_over(case, dtype):
    """Check that masked tokens take up no room in a ring.

    Positions may skip them, in any cuts, in a chunk with a mask, and in those after it without one.
    """
    s = subject_of(case, True)
    mixer, x = s.build(dtype=dtype), s.x(dtype=dtype)
    live = torch.tensor([[1, 1, 0, 0, 0, 1, 0, 1, 1, 1], [1, 0, 0, 1, 1, 0, 0, 1, 1, 1]], dtype=torch.bool)[
        :, : s.length
    ]
    positions = live.cumsum(1) - 1
    want = mixer(x, positions=positions, key_mask=live)
    for cuts in ((7,), (1,) * 7, (3, 2, 2)):
        y, state, at = [], mixer.init_state(2), 0
        for n in cuts:
            part, state = mixer.extend(
                x[:, at : at + n], state, positions=positions[:, at : at + n], key_mask=live[:, at : at + n]
            )
            y, at = [*y, part], at + n
        for i in range(at, s.length):
            part, state = mixer.extend(x[:, i : i + 1], state)
            y.append(part)
        tight = {torch.float32: 1e-5, torch.float64: 1e-10}[dtype]
        torch.testing.assert_close(torch.cat(y, 1)[live], want[live], atol=tight, rtol=tight)


def test_positions_outside_of_the_grid():
    mixer = build_mixer("axial", 8, heads=2, width=None)
    for wrong in (12, -1):
        with pytest.raises(MixerError, match=r"Axial: was given grid=\(3, 4\) and prefix=0, positions 0 to 11"):
            mixer(torch.randn(1, 12, 8), grid=(3, 4), positions=torch.full((1, 12), wrong))


@pytest.mark.parametrize("pool", ["mean", "max", "conv"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
def test_compressive_streams_with_a_state_of_another_dtype(pool, state_dtype):
    torch.manual_seed(0)
    mixer = build_mixer("compressive", 8, causal=True, heads=2, memory=2, compressed=2, rate=2, pool=pool).to(
        torch.float16
    )
    x = torch.randn(1, 9, 8).half()
    state, outputs = mixer.init_state(1, dtype=state_dtype), []
    for part in x.split(2, 1):
        y, state = mixer.extend(part, state)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), mixer(x), atol=5e-3, rtol=5e-3)
