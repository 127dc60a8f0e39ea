"""cost(T, batch) of every row against what torch counts and what is really kept."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cases import CASES, GRIDS, ONLY_CAUSAL
from tokenmix import MIXERS, MixerError, build_mixer, state_bytes, use_backend

DIM, LONG = 32, 256
# Its formula is that of torch's fused attention; the others' are those of their eager forms, of which kernels keep
# less.
FUSED = {MIXERS["attention"]}


def built(case: str, T: int, *, causal: bool):
    """The mixer of a case at a size where leading terms lead, and the arguments of its call."""
    name, options = CASES[case]
    grown = {n: T for n in ("max_len", "max_context_len") if options.get(n) is not None}
    given = {}
    if case in GRIDS:
        grid, prefix = GRIDS[case]
        given = {"grid": grid, "prefix": prefix}
    torch.manual_seed(0)
    return build_mixer(name, DIM, **{**options, **grown, "causal": causal}).eval(), given


def length(case: str, T: int) -> int:
    return T if case not in GRIDS else GRIDS[case][1] + prod(GRIDS[case][0])


def counted(mixer, x, given) -> int:
    with FlopCounterMode(display=False) as counter, use_backend("eager"), torch.no_grad():
        mixer(x, **given)
    return counter.get_total_flops()


def kept_bytes(mixer, x, given) -> int:
    """Bytes autograd keeps for backward, parameters and the input aside, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in mixer.parameters()}
    seen: dict[int, int] = {}

    def keep(t):
        place = t.untyped_storage()
        if isinstance(t, torch.Tensor) and place.data_ptr() not in own:
            seen[place.data_ptr()] = place.nbytes()
        return t

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
        use_backend("auto" if type(mixer) in FUSED else "eager"),
    ):
        y = mixer(x, **given)  # alive while storages are counted, so that no address is used twice
    del y
    return sum(seen.values())


@pytest.mark.parametrize("case", CASES)
def test_flops(case):
    T = length(case, LONG)
    mixer, given = built(case, T, causal=case in ONLY_CAUSAL)
    cost, mixing = mixer.cost(T), mixer.mixing_cost(T)
    got = counted(mixer, torch.randn(1, T, DIM), given)
    if mixing.counted is None:
        assert got >= cost.projections, "torch counts less than the projections"
        assert mixing.flops > 0
    else:
        assert got == cost.projections + mixing.counted
        assert mixing.counted <= mixing.flops
    assert mixer.cost(T, batch=3).flops == 3 * cost.flops
    assert cost.parameters == sum(p.numel() for p in mixer.parameters())


@pytest.mark.parametrize("case", CASES)
def test_bytes_kept_for_backward(case):
    T = length(case, 2 * LONG)
    mixer, given = built(case, T, causal=case in ONLY_CAUSAL)
    want, got = mixer.cost(T).activations, kept_bytes(mixer, torch.randn(1, T, DIM), given)
    assert want / 2 <= got <= 2 * want, f"{got} bytes are kept, the formula says {want}"


@pytest.mark.parametrize("case", [c for c in CASES if c not in GRIDS and MIXERS[CASES[c][0]].facts.streaming])
def test_bytes_of_the_state(case):
    for T in (3, 40):
        mixer, _ = built(case, T, causal=True)
        _, state = mixer.extend(torch.randn(2, T, DIM), mixer.init_state(2))
        assert mixer.cost(T, batch=2).state == state_bytes(state)


def test_cost_refuses_what_makes_no_sense():
    mixer = build_mixer("aft_full", 8, max_len=16)
    for wrong in (0, -1, 2.5, 17):
        with pytest.raises(MixerError, match="cost|max_len"):
            mixer.cost(wrong)
