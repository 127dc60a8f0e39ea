"""Positions of digits, samplers of positions and looped trunks: what they compute, and that streams see the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from tokenmix import MixerError
from tokenmix.models import LM, LMConfig, LoopConfig, in_shell
from tokenmix.positions import SAMPLERS, AbacusPositions, CoupledPositions, SinusoidalPositions
from tokenmix.positions.digits import digit_places
from tokenmix.positions.samplers import jitter_positions, sample_positions

ATTENTION, SIMPLE = {"name": "attention", "heads": 2}, {"name": "aft_simple"}
ABACUS, COUPLED = ({"name": name, "digits": [0, 9], "max_len": 64, "max_offset": 20} for name in ("abacus", "coupled"))


def model(**fields) -> LM:
    torch.manual_seed(0)
    given = {"dim": 16, "max_len": 64, "vocab": 16, "mixers": (ATTENTION, SIMPLE), "positions": None}
    return LM(LMConfig(**given | fields)).eval()


def places_of(digit: list[bool], valid: list[bool], run: int) -> tuple[list[int], int]:
    """Count one token at a time."""
    found = []
    for is_digit, counts in zip(digit, valid, strict=True):
        if counts:
            run = run + 1 if is_digit else 0
        found.append(run if counts and is_digit else 0)
    return found, run


def test_abacus_counts_digits_within_each_number():
    text = "12+345=753;"
    digit = torch.tensor([[c.isdigit() for c in text]])
    places, run = digit_places(digit, None, torch.zeros(1, dtype=torch.long))
    assert places.tolist() == [[1, 2, 0, 1, 2, 3, 0, 1, 2, 3, 0]]
    assert run.tolist() == [0]


def test_places_equal_those_of_a_loop_with_padding_and_any_start():
    draw = torch.Generator().manual_seed(0)
    digit, valid = torch.rand(200, 17, generator=draw) < 0.7, torch.rand(200, 17, generator=draw) < 0.8
    start = torch.randint(0, 5, (200,), generator=draw)
    places, run = digit_places(digit, valid, start)
    for row in range(200):
        wanted = places_of(digit[row].tolist(), valid[row].tolist(), int(start[row]))
        assert (places[row].tolist(), int(run[row])) == wanted


@pytest.mark.parametrize("cls", [AbacusPositions, CoupledPositions])
def test_offsets_move_digits_in_training_alone(cls):
    module = cls(4, digits=(0, 9), max_len=64, max_offset=20)
    tokens, run = torch.tensor([[1, 2, 10, 3, 12]]), torch.zeros(1, dtype=torch.long)
    row = {tuple(v): i for i, v in enumerate(module.weight.tolist())}
    assert [row[tuple(v)] for v in module.eval()(tokens, None, run)[0][0].tolist()] == [1, 2, 0, 1, 0]
    module.train()
    seen = set()
    for _ in range(400):
        found = [row[tuple(v)] for v in module(tokens, None, run)[0][0].tolist()]
        offset = found[0] - 1
        seen.add(offset)
        still = offset if cls is CoupledPositions else 0
        assert found == [1 + offset, 2 + offset, still, 1 + offset, still]
    assert seen == set(range(20))


@pytest.mark.parametrize("positions", [None, "learned", "sinusoidal", "smooth", ABACUS, COUPLED], ids=str)
@pytest.mark.parametrize(
    "loop",
    [None, LoopConfig(3, "add"), LoopConfig(2, "concat", "layer", "noise"), LoopConfig(inject="add", every="layer")],
    ids=["plain", "looped", "noise", "injected"],
)
def test_streams_in_any_cuts_equal_the_whole(positions, loop):
    lm = model(positions=positions, loop=loop).double()
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 13, (3, 12), generator=draw)
    mask = torch.ones(3, 12, dtype=torch.bool)
    mask[0, :5], mask[1, :1] = False, False
    for key_mask in (None, mask):
        whole = lm(tokens, key_mask=key_mask)
        for cuts in ((0, 1, 2, 12), (0, 6, 7, 12), (0, 12), tuple(range(13))):
            state, parts = lm.init_state(3), []
            for a, b in itertools.pairwise(cuts):
                y, state = lm.extend(tokens[:, a:b], state, key_mask=None if key_mask is None else key_mask[:, a:b])
                parts.append(y)
            valid = torch.ones_like(mask) if key_mask is None else key_mask
            assert (torch.cat(parts, 1) - whole)[valid].abs().max() < 1e-12
    assert len(state.layers) == 2 * lm.times


def test_generation_carries_the_number_on():
    lm = model(positions=ABACUS, loop=LoopConfig(2, "add"))
    prompt = torch.tensor([[1, 2, 10, 3]])
    found = lm.generate(prompt, 8, temperature=0)
    again = prompt
    for _ in range(8):
        again = torch.cat([again, lm(again)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, again)


def test_left_padding_changes_nothing():
    lm = model(positions=ABACUS)
    tokens = torch.randint(0, 13, (2, 9), generator=torch.Generator().manual_seed(0))
    padded = torch.cat([torch.full((2, 3), 5), tokens], 1)
    mask = torch.arange(12).expand(2, -1) >= 3
    assert (lm(padded, key_mask=mask)[:, 3:] - lm(tokens)).abs().max() < 1e-6


def test_no_tokens_are_no_positions():
    lm = model(positions=ABACUS)
    assert lm(torch.zeros(2, 0, dtype=torch.long)).shape == (2, 0, 16)
    assert lm(torch.zeros(0, 5, dtype=torch.long)).shape == (0, 5, 16)


def test_a_number_longer_than_the_table_is_refused():
    lm = model(positions={**ABACUS, "max_len": 8, "max_offset": 2})
    lm(torch.ones(1, 7, dtype=torch.long))
    with pytest.raises(MixerError, match="AbacusPositions: max_len=8 has rows for places 0 to 7, got 8"):
        lm(torch.ones(1, 8, dtype=torch.long))
    _, state = lm.extend(torch.ones(1, 7, dtype=torch.long), lm.init_state(1))
    with pytest.raises(MixerError, match="max_len=8 has rows for places 0 to 7, got 8"):
        lm.extend(torch.ones(1, 1, dtype=torch.long), state)


# --- loops


def test_one_pass_without_injection_is_the_plain_trunk():
    plain, looped = model(), model(loop=LoopConfig())
    looped.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 16, (2, 9))
    assert torch.equal(plain(tokens), looped(tokens))


def test_passes_are_the_blocks_stacked():
    """Two passes of one block equal two blocks with its weights; an injection is an addition before them."""
    one, two = model(mixers=(ATTENTION,), loop=LoopConfig(2)), model(mixers=(ATTENTION, ATTENTION))
    weights = one.state_dict()
    two.load_state_dict(weights | {k.replace("blocks.0", "blocks.1"): v for k, v in weights.items()})
    tokens = torch.randint(0, 16, (2, 9))
    assert torch.equal(one(tokens), two(tokens))
    injected = model(mixers=(ATTENTION,), loop=LoopConfig(2, "add"))
    injected.load_state_dict(weights)
    x = injected.embed(tokens)
    (block,) = injected.blocks
    s = block(block(x + x) + x)
    assert torch.equal(injected(tokens), injected.logits(injected.norm(s)))


def test_the_number_of_passes_may_grow_after_training():
    lm = model(loop=LoopConfig(2, "add"))
    tokens = torch.randint(0, 16, (2, 9))
    two = lm(tokens)
    lm.loop.times = 5
    assert not torch.equal(lm(tokens), two)
    y, _ = lm.extend(tokens, lm.init_state(2))
    assert (y - lm(tokens)).abs().max() < 1e-6
    old = lm.init_state(2)
    lm.loop.times = 4
    with pytest.raises(MixerError, match="2 blocks applied 4 times, but the state is that of 10"):
        lm.extend(tokens, old)


def test_random_passes_have_gradients_only_in_the_last():
    lm = model(mixers=(ATTENTION,), loop=LoopConfig(4, "add", random=1.0)).train()
    seen = {lm.loop.passes() for _ in range(400)}
    assert seen == {(n, m) for n in range(4) for m in range(1, min(4 - n, 2) + 1)}
    lm.loop = type(lm.loop)(LoopConfig(4, "add", random=0.5), 16).train()
    whole = sum(lm.loop.passes() == (0, 4) for _ in range(1000))
    assert 400 < whole < 600
    assert {lm.loop.eval().passes() for _ in range(20)} == {(0, 4)}


def test_every_weight_of_a_loop_learns():
    lm = model(loop=LoopConfig(3, "concat", "pass", "noise"), positions=ABACUS).train()
    lm(torch.randint(0, 16, (2, 9))).sum().backward()
    assert all(p.grad is not None for p in lm.parameters())
    first, second = lm(torch.ones(1, 4, dtype=torch.long)), lm(torch.ones(1, 4, dtype=torch.long))
    assert not torch.equal(first, second)  # noise and offset are drawn anew
    lm.eval()
    assert torch.equal(lm(torch.ones(1, 4, dtype=torch.long)), lm(torch.ones(1, 4, dtype=torch.long)))


# --- samplers


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampled_positions_rise_and_stay_below_the_longest(name):
    base = torch.arange(7).expand(500, -1)
    torch.manual_seed(0)
    found = SAMPLERS[name](base, 20)
    assert found.shape == base.shape
    assert bool((found.diff(dim=1) > 0).all())
    assert (int(found.min()), int(found.max())) == (0, 19)
    assert torch.equal(SAMPLERS[name](torch.arange(20).expand(3, -1), 20), torch.arange(20).expand(3, -1))
    gaps = found.diff(dim=1) - 1
    if name == "offset":
        assert int(gaps.abs().max()) == 0
        assert set(found[:, 0].tolist()) == set(range(14))
    if name == "pose":
        assert int((gaps > 0).sum(1).max()) == 1
        assert set(found[:, 0].tolist()) == {0}
    if name == "randomised":
        each = torch.bincount(found.flatten(), minlength=20)
        assert float(each.min()) / float(each.max()) > 0.7


def test_a_model_samples_in_training_alone_and_tells_its_mixers():
    seen = []
    lm = model(mixers=(ATTENTION,), positions="sinusoidal", sample_positions={"name": "offset", "longest": 64})
    lm.blocks[0].mixer.register_forward_pre_hook(lambda m, a, k: seen.append(k.get("positions")), with_kwargs=True)
    tokens = torch.randint(0, 16, (4, 9))
    plain = model(mixers=(ATTENTION,), positions="sinusoidal")
    assert torch.equal(lm(tokens), plain(tokens))
    assert seen == [None]
    torch.manual_seed(3)
    lm.train()(tokens)
    positions = seen[1]
    added = SinusoidalPositions(16)(positions).float()
    torch.manual_seed(3)
    x = lm.embed(tokens) + added
    lm.config = plain.config
    assert torch.equal(
        lm.read(x, positions=positions, key_mask=None), lm.logits(lm.norm(lm.blocks[0](x, positions=positions)))
    )
    assert len({tuple(row) for row in positions.tolist()}) > 1


def test_cape_jitters_what_is_added_and_leaves_the_mixers_alone():
    seen = []
    cape = {"name": "cape", "global_shift": 5.0, "local_shift": 0.5, "scale": 1.1}
    lm = model(mixers=(ATTENTION,), positions="sinusoidal", sample_positions=cape)
    lm.blocks[0].mixer.register_forward_pre_hook(lambda m, a, k: seen.append(k.get("positions")), with_kwargs=True)
    tokens = torch.randint(0, 16, (4, 9))
    plain = model(mixers=(ATTENTION,), positions="sinusoidal")
    assert torch.equal(lm(tokens), plain(tokens))
    torch.manual_seed(3)
    got = lm.train()(tokens)
    assert seen == [None, None]
    torch.manual_seed(3)
    at = sample_positions(cape, torch.arange(9).expand(4, 9), "test")
    x = plain.embed(tokens) + SinusoidalPositions(16)(at).float()
    assert torch.equal(got, plain.logits(plain.norm(plain.blocks[0](x))))


def test_cape_draws_within_its_bounds_and_evenly():
    torch.manual_seed(0)
    at = torch.arange(50).expand(20_000, 50)
    shifted = jitter_positions(at, global_shift=4.0, local_shift=0.0, scale=1.0) - at
    assert float((shifted - shifted[:, :1]).abs().max()) < 1e-12
    assert float(shifted.abs().max()) <= 4 < 4.01 * float(shifted.abs().max())
    moved = jitter_positions(at, global_shift=0.0, local_shift=0.5, scale=1.0)
    assert bool((moved.diff(dim=1) > 0).all())
    assert float((moved - at).abs().max()) <= 0.5
    assert float((moved - at).std()) == pytest.approx(12**-0.5, rel=0.01)
    grown = (jitter_positions(at, global_shift=0.0, local_shift=0.0, scale=2.0)[:, 1:] / at[:, 1:]).log2()
    assert float((grown - grown[:, :1]).abs().max()) < 1e-12
    assert float(grown.abs().max()) <= 1
    assert float(grown.mean()) == pytest.approx(0, abs=0.02)
    assert torch.equal(jitter_positions(at[:2], global_shift=0.0, local_shift=0.0, scale=1.0), at[:2].double())


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"positions": "abacuss"},
            "one of learned, sinusoidal, abacus, coupled, smooth, ...}, such a name or null, got 'abacuss'",
        ),
        ({"positions": {"dim": 3}}, r"such a name or null, got \{'dim': 3\}"),
        ({"positions": {"name": "abacus", "offset": 3}}, "the options of 'abacus' are max_len, digits, max_offset"),
        ({"positions": {"name": "abacus", "digits": 9}}, "digits must be the first and the last token"),
        ({"positions": {"name": "abacus", "init_std": -1}}, "AbacusPositions: init_std must be a number >= 0, got -1"),
        ({"positions": {"name": "abacus", "digits": [9, 0]}}, "digits must be the first and the last token"),
        ({"positions": {"name": "coupled", "max_len": 50}}, "1 <= max_offset < max_len, got 50 and 100"),
        ({"sample_positions": {"name": "offset"}}, r'sample_positions must be like \{"name": "offset"'),
        ({"sample_positions": {"name": "shape", "longest": 9}}, "no sampler 'shape'; nearest: cape"),
        ({"sample_positions": {"name": "pose", "longest": 99}}, "positions up to 98, but the model has max_len=64"),
        ({"sample_positions": {"name": "cape"}}, "'cape' takes the numbers global_shift >= 0, 0 <= local"),
        (
            {
                "positions": "learned",
                "sample_positions": {"name": "cape", "global_shift": 1, "local_shift": 0.5, "scale": 1.0},
            },
            "positions that are no integers, which positions='sinusoidal' can take and positions='learned' cannot",
        ),
        ({"loop": {"times": 3}}, "loop must be a LoopConfig or None"),
    ],
)
def test_wrong_fields_are_one_clear_line(fields, words):
    with pytest.raises(MixerError, match=words) as caught:
        model(**fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"times": 0}, "times must be an integer of at least 1, got 0"),
        ({"inject": "mul"}, "inject='mul' is unknown; choose one of 'add', 'concat', None"),
        ({"every": "block"}, "every='block' is unknown"),
        ({"start": "noise"}, "would never read the input"),
        ({"random": 1.5}, r"random must be in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_loops_are_one_clear_line(options, words):
    with pytest.raises(MixerError, match="loop: .*" + words):
        LoopConfig(**options)


def test_a_batch_longer_than_its_sampler_is_refused():
    lm = model(sample_positions={"name": "offset", "longest": 8}).train()
    with pytest.raises(MixerError, match="sample_positions has longest=8, got 9 tokens"):
        lm(torch.ones(1, 9, dtype=torch.long))


def test_configs_go_to_json_and_keep_digits_in_any_shell():
    config = model(positions=ABACUS, loop=LoopConfig(3, "add"), sample_positions={"name": "pose", "longest": 9}).config
    assert LMConfig.from_json(config.to_json()) == config
    assert in_shell(config, "modern").positions == in_shell(config, "paper").positions == ABACUS
