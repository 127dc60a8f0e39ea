"""Encoder-decoders: padding, streaming, contexts of any length, greedy and beam search, counts."""

from itertools import product

import pytest
import torch

import tokenmix
from tokenmix import MixerError
from tokenmix.models import Seq2SeqConfig, build_model, in_shell
from tokenmix.models.beam import BeamSearch
from tokenmix.models.seq2seq import Reread, Streamed

VOCAB = 14
ROWS = {
    "attention": {"mixers": ({"name": "attention", "heads": 2},)},
    "aft_simple": {"mixers": ({"name": "aft_simple"},), "cross_mixers": ({"name": "aft_simple"},)},
    "aft_full": {"mixers": ({"name": "aft_full", "rank": 4},), "cross_mixers": ({"name": "attention", "heads": 2},)},
    "hydra": {"mixers": ({"name": "hydra"},), "cross_mixers": ({"name": "hydra"},)},
    "linear": {"mixers": ({"name": "linear", "heads": 2},), "cross_mixers": ({"name": "linear", "heads": 2},)},
    "synthesizer": {"mixers": ({"name": "synthesizer_random", "heads": 2},)},
    "mixed": {
        "mixers": ({"name": "aft_local", "window": 3}, {"name": "attention", "heads": 2}),
        "encoder_mixers": ({"name": "external", "slots": 4},),
    },
    "lightconv": {"mixers": ({"name": "lightconv", "heads": 2, "kernel_size": 3},)},
    "no stream": {"mixers": ({"name": "reformer", "heads": 2, "paper_form": True},)},
}


def config(row="attention", shell="modern", **options):
    given = {"dim": 8, "max_len": 16, "layers": 2, "vocab": VOCAB, "init_std": 0.3, **ROWS[row], **options}
    return in_shell(Seq2SeqConfig(**given), shell)


def model(row="attention", shell="modern", seed=0, **options):
    torch.manual_seed(seed)
    return build_model(config(row, shell, **options)).double().eval()


def tokens(*shape, seed=1):
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


STREAMING = [row for row in ROWS if row != "no stream"]


@pytest.mark.parametrize("shell", ["paper", "modern"])
@pytest.mark.parametrize("row", STREAMING)
def test_a_streamed_target_equals_the_whole(row, shell):
    net, source, target = model(row, shell), tokens(3, 9), tokens(3, 8, seed=2)
    mask = torch.arange(9) < torch.tensor([9, 5, 1])[:, None]
    whole, state, parts = net(source, target, mask), net.init_state(source, mask), []
    for chunk in target.split([3, 1, 4], 1):
        logits, state = net.extend(chunk, state)
        parts.append(logits)
    close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("row", ROWS)
def test_padding_on_either_side_changes_nothing(row):
    net, source, target = model(row), tokens(1, 6), tokens(1, 5, seed=2)
    alone = net(source, target)
    for left, right in ((3, 0), (0, 3), (2, 1)):
        pad = [torch.zeros(1, n, dtype=torch.long) for n in (left, right)]
        mask = torch.cat([torch.full((1, left), False), torch.ones(1, 6).bool(), torch.full((1, right), False)], 1)
        close(net(torch.cat([pad[0], source, pad[1]], 1), target, mask), alone)
        tail = torch.arange(5 + right)[None] < 5
        close(net(source, torch.cat([target, pad[1]], 1), None, tail)[:, :5], alone)
        if left:
            head = torch.arange(5 + left)[None] >= left
            close(net(source, torch.cat([pad[0], target], 1), None, head)[:, left:], alone)


@pytest.mark.parametrize("row", ROWS)
def test_a_target_does_not_see_its_future_and_rows_do_not_see_each_other(row):
    net, source, target = model(row), tokens(2, 6), tokens(2, 6, seed=2)
    before = net(source, target)
    changed = target.clone()
    changed[0, 4:] = 3
    close(net(source, changed)[0, :4], before[0, :4])
    close(net(source, changed)[1], before[1])
    other = source.clone()
    other[0] = 3
    assert not torch.allclose(net(other, target)[0], before[0])
    close(net(other, target)[1], before[1])


def test_the_context_may_have_any_length():
    net = model("linear", max_len=16)
    for n in (1, 2, 16):
        assert net(tokens(2, n), tokens(2, 3)).shape == (2, 3, VOCAB)


@pytest.mark.parametrize("row", ["attention", "aft_simple", "no stream"])
def test_greedy_takes_the_most_likely_token_and_stops_at_the_end(row):
    net, source = model(row, seed=3), tokens(4, 6)
    written = net.generate(source, 12)
    target = torch.full((4, 1), net.config.start)
    for step in range(written.shape[1]):
        ended = (target[:, 1:] == net.config.end).any(1)
        best = net(source, target)[:, -1].argmax(-1)
        assert torch.equal(written[:, step], torch.where(ended, net.config.end, best))
        target = torch.cat([target, written[:, step : step + 1]], 1)


def every_target(net, source, n, penalty):
    """Return the best of all targets of up to n tokens that end, and its score."""
    best = (float("-inf"), [])
    others = [t for t in range(VOCAB) if t != net.config.end]
    for length in range(n):
        middles = product(others, repeat=length)
        targets = torch.tensor([[net.config.start, *middle, net.config.end] for middle in middles])
        logs = net(source.expand(len(targets), -1), targets[:, :-1]).log_softmax(-1)
        scores = logs.gather(2, targets[:, 1:, None]).sum((1, 2)) / (length + 1) ** penalty
        best = max(best, (scores.max().item(), targets[scores.argmax(), 1:].tolist()))
    return best


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("row", ["attention", "no stream"])
def test_a_wide_beam_finds_what_a_search_of_everything_finds(row, penalty):
    net, source = model(row, seed=5, init_std=0.6), tokens(2, 5)
    written = net.generate(source, 3, beams=VOCAB**3, length_penalty=penalty)
    for i in range(2):
        score, target = every_target(net, source[i : i + 1], 3, penalty)
        assert written[i, : len(target)].tolist() == target
        assert score > float("-inf")


@pytest.mark.parametrize("row", ["attention", "aft_simple", "linear", "no stream"])
def test_beams_of_a_batch_are_those_of_its_rows(row):
    net, source = model(row, seed=2), tokens(5, 6)
    mask = torch.arange(6) < torch.tensor([6, 4, 1, 6, 3])[:, None]
    together = net.generate(source, 9, source_mask=mask, beams=3)
    for i, n in enumerate(mask.sum(1)):
        alone = net.generate(source[i : i + 1, :n], 9, beams=3)[0]
        rest = together[i, len(alone) :]
        assert together[i, : len(alone)].tolist() == alone.tolist()
        assert (rest == net.config.end).all()


@pytest.mark.parametrize("row", ["attention", "aft_simple", "linear"])
def test_beams_of_states_are_those_of_targets_read_again(row):
    net, source = model(row, seed=4, init_std=0.6), tokens(4, 6)
    search, given = BeamSearch(4, 1.0, net.config.end), {"device": source.device, "start": net.config.start}
    streamed = search.write(Streamed(net, source, None), 4, 9, **given)
    assert torch.equal(streamed, search.write(Reread(net, source, None), 4, 9, **given))


class Table:
    """A writer whose next token depends on the last one alone."""

    def __init__(self, logits, rows):
        self.logits, self.rows = logits, rows

    def next(self, token):
        assert len(token) == self.rows
        return self.logits[token[:, 0]]

    def reorder(self, index):
        self.rows = len(index)


def test_a_beam_follows_a_target_that_begins_less_likely():
    # a (0.6) leads to b or c alike; d (0.4) leads to the end for certain
    a, b, c, d, end, start = range(6)
    probs = torch.zeros(6, 6)
    probs[start, a], probs[start, d] = 0.6, 0.4
    probs[a, b] = probs[a, c] = 0.5
    probs[b, end] = probs[c, end] = probs[d, end] = 1.0
    found = BeamSearch(2, 0.0, end).write(Table(probs.log(), 1), 1, 4, torch.device("cpu"), start=start)
    assert found.tolist() == [[d, end]]
    assert BeamSearch(1, 0.0, end).write(Table(probs.log(), 1), 1, 4, torch.device("cpu"), start=start)[0, 0] == a


def test_generation_without_an_end_gives_the_open_target():
    logits = torch.full((4, 4), -1e9)
    logits[:, 3] = 0.0
    found = BeamSearch(2, 1.0, 2).write(Table(logits, 2), 2, 5, torch.device("cpu"), start=1)
    assert found.tolist() == [[3] * 5] * 2


def test_sampling_is_repeatable():
    net, source = model(), tokens(2, 6)
    a, b, c = (net.generate(source, 8, temperature=1.0, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_an_empty_batch_gives_an_empty_answer():
    net = model()
    assert net.generate(tokens(0, 6), 4, beams=2).shape[0] == 0
    assert net(tokens(0, 6), tokens(0, 3)).shape == (0, 3, VOCAB)


def test_weights_and_state_go_to_float16_and_back_through_json():
    c = config("mixed")
    assert Seq2SeqConfig.from_json(c.to_json()) == c
    net = build_model(c).eval()
    state = net.init_state(tokens(2, 6))
    assert tokenmix.reorder(state, torch.tensor([1, 1, 0])).position.shape == (3,)


def test_the_base_transformer_of_the_synthesizer_paper():
    wmt = {"qkv_bias": False, "out_bias": False, "heads": 8}
    shape = {"dim": 512, "max_len": 256, "layers": 6, "vocab": 44_750, "cross_mixers": [{"name": "attention", **wmt}]}

    def millions(spec):
        with torch.device("meta"):
            net = build_model(Seq2SeqConfig(mixers=(spec,), **shape))
        return sum(p.numel() for p in net.parameters() if p.requires_grad) / 1e6

    found = {
        "vanilla": millions({"name": "attention", **wmt}),
        "fixed": millions({"name": "synthesizer_random", "trainable": False, **wmt}),
        "random": millions({"name": "synthesizer_random", **wmt}),
        "dense": millions({"name": "synthesizer_dense", "hidden": 0, "bias": False, **wmt}),
        "random + vanilla": millions({"name": "synthesizer_mixture", "parts": ["random", "attention"], **wmt}),
    }
    assert {name: round(n) for name, n in found.items()} == {
        "vanilla": 67,
        "fixed": 61,
        "random": 67,
        "dense": 62,
        "random + vanilla": 73,
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            lambda: model(cross_mixers=({"name": "external"},)),
            "cannot be a cross mixer; choose among attention",
        ),
        (lambda: config(cross_mixers=()), "cross_mixers is empty"),
        (lambda: config(end=1), "two different tokens"),
        (lambda: config(end=VOCAB), "two different tokens"),
        (lambda: config(encoder_layers=0), "encoder_layers must be positive"),
        (lambda: config(embed_scale=0.0), "embed_scale must be positive"),
        (lambda: config(positions="abacus", shell="paper"), "positions"),
        (lambda: model()(tokens(2, 3), tokens(3, 3)), "2 sources and 3 targets"),
        (lambda: model()(tokens(2, 0), tokens(2, 3)), "source needs at least one token"),
        (lambda: model()(tokens(2, 3), tokens(2, 3) + VOCAB), f"tokens must be in 0..{VOCAB - 1}"),
        (lambda: model()(tokens(2, 3), tokens(2, 3), torch.ones(2, 4).bool()), "bool key_mask of shape"),
        (lambda: model("synthesizer")(tokens(2, 17), tokens(2, 3)), "reads sources of up to 16 tokens"),
        (lambda: model("synthesizer").generate(tokens(2, 3), 17), "at most max_len=16"),
        (lambda: model().generate(tokens(2, 3), 0), "n must be an integer of at least 1"),
        (lambda: model().generate(tokens(2, 3), 3, beams=0), "beams must be an integer of at least 1"),
        (lambda: model().generate(tokens(2, 3), 3, beams=2, temperature=1.0), "does not sample"),
        (lambda: model().generate(tokens(2, 3), 3, beams=2, length_penalty=-1.0), "length_penalty must be 0 or more"),
        (lambda: model("no stream").init_state(tokens(2, 3)), "cannot stream"),
        (lambda: model().extend(tokens(3, 1), model().init_state(tokens(2, 3))), "tokens of shape (2, 1 or more)"),
    ],
)
def test_bad_input_is_one_clear_line(wrong, words):
    with pytest.raises(MixerError) as caught:
        wrong()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
