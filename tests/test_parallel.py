"""SimWorld: one sequence on many virtual ranks equals one process, and what the ranks send does not grow with it."""

from __future__ import annotations

import pytest
import torch

from cases import CASES
from shared_rows import BLOCKS, ROWS, SEGMENTS
from tokenmix import MixerError
from tokenmix.models import LM, LMConfig
from tokenmix.parallel import SimWorld
from tokenmix.testing import inputs, subject


def mixer_of(case: str, T: int):
    name, options = CASES[case]
    longer = {n: max(T, options[n]) for n in ("max_len", "max_context_len") if options.get(n)}
    return subject(name, {**options, **longer, "causal": True}, dim=8).build()


def equals_one_process(case: str, T: int, ranks: int, *, scan=None, key_mask=None, cuts=None) -> SimWorld:
    """Compare outputs and gradients, relative to the largest, and return the world."""
    mixer, world = mixer_of(case, T), SimWorld(ranks, scan=scan)
    x = inputs.noise(2, T, 8, seed=ranks).requires_grad_()
    live = torch.ones(2, T, 1) if key_mask is None else key_mask[..., None].double()
    weight, leaves = inputs.noise(2, T, 8, seed=3) * live, [x, *mixer.parameters()]
    want = mixer(x, key_mask=key_mask)
    got = world.mix(mixer, x, key_mask=key_mask, cuts=cuts)
    scale = float(want.detach().abs().max())
    assert float(((got - want).detach() * live).abs().max()) <= 1e-10 * scale
    pairs = [
        [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)]
        for found in (torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True) for y in (got, want))
    ]
    largest = max(float(b.abs().max()) for b in pairs[1])
    assert max(float((a - b).abs().max()) for a, b in zip(*pairs, strict=True)) <= 1e-10 * largest
    return world


@pytest.mark.parametrize("case", ROWS)
def test_equals_one_process(case):
    """At few ranks, some of which have no token, with padding in front and holes."""
    masks = inputs.key_masks(12)
    for ranks, scan, mask, cuts in (
        (2, "gather", masks["left"], None),
        (3, "steps", masks["holes"], None),
        (7, "steps", masks["mixed"], (0, 1, 1, 5, 6, 12)),
    ):
        equals_one_process(case, 12, ranks, scan=scan, key_mask=mask, cuts=cuts)


@pytest.mark.parametrize("case", BLOCKS)
def test_16_ranks_pass_their_keys_on(case):
    equals_one_process(case, 40, 16, key_mask=torch.arange(40) >= torch.tensor([[1], [19]]))


@pytest.mark.parametrize("case", ["attention-alibi", "aft_full-factors"])
def test_blocks_of_more_keys_than_are_weighed_at_once(case, monkeypatch):
    """Pieces of three queries, in shares of eight."""
    monkeypatch.setattr("tokenmix.mixers.key_blocks.ROWS", 3)
    equals_one_process(case, 24, 3)


@pytest.mark.parametrize("case", ["attention-rotary", "attention-fire", "aft_full-factors"])
@pytest.mark.parametrize("starts", [(0, 5, 8, 9), (4,), (2, 9)])
def test_documents_see_no_keys_of_others(case, starts):
    """Cut at 4, 4 and 8, so a document begins with a share, inside one, and after an empty one."""
    mixer, x = mixer_of(case, 12), inputs.noise(2, 12, 8, seed=1)
    want = torch.cat([mixer(part) for part in x.tensor_split(starts, 1) if part.shape[1]], 1)
    got = SimWorld(4).mix(mixer, x, starts=starts, cuts=(4, 4, 8))
    assert torch.allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("case", ["attention-rotary", "attention-fire", "aft_full-fire"])
def test_positions_may_be_given(case):
    mixer, x = mixer_of(case, 12), inputs.noise(2, 12, 8, seed=1)
    at = torch.stack([torch.arange(12) * 3, torch.arange(12) + 100])
    assert torch.allclose(SimWorld(3).mix(mixer, x, positions=at), mixer(x, positions=at), atol=1e-12)


@pytest.mark.parametrize("case", ["attention", "attention-normed", "aft_full", "aft_full-fire"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_keys_reach_no_earlier_query(case, value):
    """Token 5, the second of its share, spoils as much as it does in one process."""
    mixer, x = mixer_of(case, 12), inputs.noise(1, 12, 8, seed=1)
    x[0, 5, 2] = value
    want, got = mixer(x), SimWorld(3).mix(mixer, x)
    assert torch.isfinite(want[:, :5]).all()
    assert not torch.isfinite(want[:, 5:]).any()
    assert torch.allclose(got, want, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(("case", "token"), [("attention", 4 * 16 + 9), ("aft_full-factors", 4 * 16 + 9)])
def test_keys_pass_by_once(case, token):
    """Every rank receives each block before it: keys and values in float32, a byte of validity, eight of position."""
    mixer, world = mixer_of(case, 64).float(), SimWorld(8)
    with torch.no_grad():
        world.mix(mixer, inputs.noise(1, 64, 8, seed=1).float())
    counters = 26  # of one row, gathered
    assert world.traffic == (7 * (8 * token + counters), 28 * 8 * token + 56 * counters, 3 + 7)


@pytest.mark.parametrize("case", SEGMENTS)
def test_64_ranks(case):
    mask = torch.arange(128) >= torch.tensor([[3], [70]])
    equals_one_process(case, 128, 64, scan="steps", key_mask=mask)


@pytest.mark.parametrize("case", SEGMENTS)
def test_1024_ranks(case):
    """A token on each rank, and on some two or none."""
    cuts = sorted(torch.randint(1025, (1023,), generator=torch.Generator().manual_seed(0)).tolist())
    world = equals_one_process(case, 1024, 1024, scan="steps", cuts=cuts)
    assert world.traffic.rounds >= 10


@pytest.mark.parametrize("case", ["aft_simple", "hydra", "linear", "aft_local-3", "aft_forget", "lightconv"])
def test_traffic_does_not_grow_with_the_sequence(case):
    found = []
    for T in (256, 4096):
        mixer, world = mixer_of(case, T).float(), SimWorld(4)
        with torch.no_grad():
            world.mix(mixer, inputs.noise(1, T, 8, seed=1).float())
        found.append(world.traffic)
    assert found[0] == found[1]
    assert found[0].received > 0


def test_one_rank_sends_nothing():
    assert equals_one_process("aft_forget", 12, 1).traffic == (0, 0, 0)


CARRIES = {
    "hydra": lambda D: 8 * D + 8,
    "aft_simple": lambda D: 24 * D,
    "linear": lambda D: 8 * D * (D // 2 + 2),
    "aft_local-3": lambda D: 24 * D + 2 * (8 * D + 9) + 8,
}
"""Bytes for each row by the formulas of docs/scale.md, without 18 bytes of counters."""


@pytest.mark.parametrize("case", CARRIES)
def test_traffic_is_that_of_the_formulas(case):
    mixer, x = mixer_of(case, 64).float(), inputs.noise(2, 64, 8, seed=1).float()
    carry = 2 * (CARRIES[case](8) + 18)
    world = SimWorld(8, scan="gather", latency=1.0, bandwidth=1.0)
    world.mix(mixer, x)
    assert world.traffic == (7 * carry, 56 * carry, 3)
    assert world.seconds() == 3 + 7 * carry
    world.reset()
    world.scan = "steps"
    world.mix(mixer, x)
    assert world.traffic == (4 * carry, (7 + 6 + 4 + 7) * carry, 4)


def test_a_hybrid_model_equals_one_process():
    torch.manual_seed(0)
    mixers = ({"name": "aft_simple"}, {"name": "lightconv", "heads": 2, "kernel_size": 3}, {"name": "aft_forget"})
    mixers += ({"name": "attention", "heads": 2, "positions": {"name": "rotary"}},)
    model = LM(LMConfig(dim=16, layers=4, vocab=7, mixers=mixers, max_len=32)).double()
    tokens, mask = torch.randint(0, 7, (2, 21)), torch.arange(21) >= torch.tensor([[0], [4]])
    want = model(tokens, key_mask=mask)
    with SimWorld(4).sharing(model):
        got = model(tokens, key_mask=mask)
    assert torch.allclose(got[mask], want[mask], atol=1e-12)
    assert torch.equal(model(tokens, key_mask=mask), want)
    model = LM(LMConfig(dim=16, layers=1, vocab=7, mixers=({"name": "strided", "stride": 3},), max_len=32))
    with SimWorld(4).sharing(model), pytest.raises(MixerError, match="Strided.*: has neither segments nor blocks"):
        model(tokens)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda m, x: SimWorld(0), "expects ranks as a positive integer, got 0"),
        (lambda m, x: SimWorld(2.0), "expects ranks as a positive integer, got 2.0"),
        (lambda m, x: SimWorld(2, scan="ring"), "scan must be 'gather', 'steps' or None, got 'ring'"),
        (lambda m, x: SimWorld(2, bandwidth=0), "bandwidth > 0"),
        (lambda m, x: SimWorld(2).mix(m, x[:, :0]), "needs at least one token, got an empty sequence"),
        (
            lambda m, x: SimWorld(2).mix(m, x, key_mask=torch.ones(1, 5) > 0),
            r"key_mask of shape \(1, 4\), got .*\(1, 5\)",
        ),
        (
            lambda m, x: SimWorld(2).mix(m, x, positions=torch.arange(5)[None]),
            r"positions of shape \(1, 4\), got \(1, 5\)",
        ),
        (
            lambda m, x: SimWorld(2).mix(m, x, starts=(1, 0)),
            r"starts that rise from 0 or more to below 2, got \[1, 0\]",
        ),
        (lambda m, x: SimWorld(3).mix(m, x, cuts=(3, 2)), "2 indices between 0 and 4 that do not fall"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(wrong, said):
    with pytest.raises(MixerError, match=said) as caught:
        wrong(mixer_of("aft_simple", 4), torch.randn(1, 4, 8, dtype=torch.float64))
    assert "\n" not in str(caught.value)
