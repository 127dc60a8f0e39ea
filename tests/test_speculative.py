"""Guesses change how often a model is called, and never what it writes; states may be gone on from twice."""

from __future__ import annotations

from itertools import product
from math import inf, sqrt

import pytest
import torch

from test_decoder import CALLED, PLANNED, build, spec
from tokenmix import MixerError, reorder
from tokenmix.kernels import cpu
from tokenmix.models import Drafter, ModelDrafter, NgramDrafter, speculative
from tokenmix.models.sampling import draw_noise, keep_top
from tokenmix.models.speculative import count_right

DELTA, ROTARY = spec("gated_delta"), spec("rotary")
MODELS = {name: (spec(name),) for name in (*PLANNED, *CALLED)} | {
    "delta_attention": (DELTA, DELTA, DELTA, ROTARY),
    "local_forget": (spec("aft_local"), spec("aft_forget"), spec("attention")),
}
SAMPLED = {"seed": 3, "temperature": 0.7, "top_k": 20, "top_p": 0.9}


def make(name, **options):
    return build(*MODELS[name], layers=max(2, len(MODELS[name])), **options)


class Knowing(Drafter):
    """Guesses the next tokens of known texts (B, T); of those at places that ``wrong`` divides, others."""

    def __init__(self, texts, tokens=5, wrong=7):
        self.texts, self.tokens, self.wrong = texts.tolist(), tokens, wrong

    def guess(self, row, text, most, choose):
        start = len(text)
        guess = self.texts[row][start : start + min(most, self.tokens)]
        return [(token + 1) % 40 if (start + i + row) % self.wrong == 0 else token for i, token in enumerate(guess)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_guesses_leave_the_text_as_it_is(name, rows):
    model, prompt = make(name), torch.randint(40, (rows, 4))
    options = {"temperature": 0} if rows == 1 else SAMPLED
    expected = model.generate(prompt, 16, decoder=None, **options)
    decoder = model.decoder() if rows == 1 and cpu.available() else None
    draft = Knowing(expected)
    assert torch.equal(model.generate(prompt, 16, draft=draft, decoder=decoder, **options), expected)
    assert draft.counts.calls < 14
    assert 0 < draft.counts.right < draft.counts.guessed


@torch.no_grad()
def test_guesses_of_every_kind_leave_the_text_as_it_is():
    model, small = make("local_forget", max_len=128), make("aft_simple", max_len=128)
    for rows, n, options in ((1, 70, {"temperature": 0}), (2, 20, SAMPLED)):
        prompt = torch.randint(3, (rows, 12))
        expected = model.generate(prompt, n, **options)
        for draft in ("ngram", small, ModelDrafter(model, tokens=3)):
            assert torch.equal(model.generate(prompt, n, draft=draft, **options), expected)
        assert draft.counts.acceptance == 1  # the model itself chooses with the same random numbers
        assert draft.counts.tokens_per_check == pytest.approx(4, abs=0.3)


@torch.no_grad()
def test_padded_prompts_and_the_last_token_of_a_model():
    model, prompt = make("local_forget"), torch.randint(40, (3, 10))
    mask = torch.arange(10) >= torch.tensor([[1], [4], [7]])
    for positions in ("learned", "abacus"):
        model = make("local_forget", positions=positions)
        expected = model.generate(prompt, 55, key_mask=mask, temperature=0)  # 9 + 55 are all there may be
        draft = Knowing(expected)
        draft.texts = [row[pad:] for row, pad in zip(draft.texts, (1, 4, 7), strict=True)]
        assert torch.equal(model.generate(prompt, 55, key_mask=mask, temperature=0, draft=draft), expected)
        assert draft.counts.right > 40
    short = make("aft_simple", max_len=20)
    assert torch.equal(
        model.generate(prompt[:1], 30, temperature=0, draft=short), model.generate(prompt[:1], 30, temperature=0)
    )
    assert model.generate(prompt, 0, draft="ngram").shape == (3, 10)
    assert model.generate(prompt[:0], 5, draft="ngram").shape == (0, 15)
    assert model.generate(prompt.to(torch.uint8), 5, draft="ngram").dtype is torch.uint8


def test_counts_are_those_of_what_happened():
    model, prompt = make("aft_simple"), torch.randint(40, (1, 4))
    expected = model.generate(prompt, 25, temperature=0)
    draft = Knowing(expected, tokens=5, wrong=100)
    model.generate(prompt, 25, temperature=0, draft=draft)  # the prompt gives 1 token, 4 checks 6 each
    assert (draft.counts.calls, draft.counts.checks, draft.counts.guessed, draft.counts.right) == (4, 4, 20, 20)
    draft = Knowing(expected, tokens=2, wrong=1)
    model.generate(prompt, 25, temperature=0, draft=draft)
    assert (draft.counts.right, draft.counts.tokens_per_check) == (0, 1)
    assert draft.counts.calls == 24


def test_ngrams_are_looked_up_in_the_text_so_far():
    draft = NgramDrafter(4, longest=3, shortest=2)
    draft.begin(None, 2)
    none = pytest.fail
    text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8, 1, 2, 3]
    assert draft.guess(0, text, 9, none) == [4, 5, 9, 2]  # three tokens count before two, though 2, 3 came later
    assert draft.guess(0, [*text, 7], 9, none) == [8, 1, 2, 3]
    assert draft.guess(0, [*text, 7, 8, 6], 9, none) == []
    assert draft.guess(1, [6, 2, 3], 9, none) == []  # rows do not know each other
    assert draft.guess(1, [6, 2, 3, 2, 3], 9, none) == [2, 3, 2, 3]  # a copy may read what it writes
    assert draft.guess(1, [6, 2, 3, 2, 3], 1, none) == [2]


def chi_square(draft):
    """Return how many standard deviations the counts of continuations are from what their probabilities make likely."""
    torch.manual_seed(0)
    model, rows, sampling = build(DELTA, ROTARY, vocab=4, max_len=16), 1000, {"temperature": 1.3, "top_k": 3}
    prompt = torch.tensor([[1, 2, 1, 2]])
    probs = {}
    for text in product(range(4), repeat=3):
        logits = model(torch.cat([prompt, torch.tensor([text])], 1))[0, 3:-1]
        chances = keep_top(logits / 1.3, 3, None).softmax(-1)
        probs[text] = float(chances[torch.arange(3), torch.tensor(text)].prod())
    found = dict.fromkeys(probs, 0)
    for text in model.generate(prompt.expand(rows, -1), 3, seed=0, draft=draft, **sampling)[:, 4:].tolist():
        found[tuple(text)] += 1
    if any(found[text] for text, p in probs.items() if p == 0):
        return inf
    seen = [(found[text], rows * p) for text, p in probs.items() if p > 0]
    assert min(expected for _, expected in seen) > 2
    free = len(seen) - 1
    return (sum((n - expected) ** 2 / expected for n, expected in seen) - free) / sqrt(2 * free)


class Preferring(Drafter):
    """Guesses with probabilities of its own, which are not those of the model."""

    def guess(self, row, text, most, choose):
        return [choose(torch.tensor([0.0, 1.0, 0.5, -1.0]), i) for i in range(most)]


DRAFTS = {"ngram": lambda: NgramDrafter(shortest=1), "preferring": Preferring}


@pytest.mark.parametrize("draft", DRAFTS)
@torch.no_grad()
def test_sampled_texts_have_their_probabilities(draft):
    assert abs(chi_square(DRAFTS[draft]())) < 3


def take_the_first_guess(chosen, guess):
    chosen[: min(len(guess), 1)] = guess[:1]
    return count_right(chosen, guess)


def take_what_follows_a_wrong_guess(chosen, guess):
    return len(guess)


def draw_the_same_numbers(logits, generator):
    return draw_noise(logits, torch.Generator().manual_seed(0))


BUGS = {
    "take_the_first_guess": (speculative, "count_right", take_the_first_guess),
    "take_what_follows_a_wrong_guess": (speculative, "count_right", take_what_follows_a_wrong_guess),
    "draw_the_same_numbers": (speculative, "draw_noise", draw_the_same_numbers),
}


@pytest.mark.parametrize("bug", BUGS)
@torch.no_grad()
def test_a_wrong_rule_of_acceptance_is_noticed(bug, monkeypatch):
    monkeypatch.setattr(*BUGS[bug])
    assert chi_square(NgramDrafter(shortest=1)) > 10


@pytest.mark.parametrize("name", ["attention", "aft_full", "delta_attention"])
@torch.no_grad()
def test_several_prompts_go_on_from_one_state(name):
    """None disturbs another, in a decoder and in memory that grows in place, whatever guesses were dropped."""
    model = make(name, max_len=512)
    shared, *prompts = (torch.randint(40, (1, n)) for n in (260, 5, 9))
    _, state = model.prefill(shared)
    kept = torch.utils._pytree.tree_map(torch.clone, state)
    expected = [
        model.generate(torch.cat([shared, prompt], 1), 20, temperature=0, decoder=None)[:, 260:] for prompt in prompts
    ]
    decoder = model.decoder() if cpu.available() else None
    for options in ({}, {"decoder": decoder}, {"draft": "ngram", "decoder": decoder}):
        for prompt, text in zip([*prompts, prompts[0]], [*expected, expected[0]], strict=True):
            assert torch.equal(model.generate(prompt, 20, temperature=0, state=state, **options), text)
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (state, kept)), strict=True):
        assert torch.equal(a, b)
    rows, prompt = reorder(state, torch.zeros(2, dtype=torch.long)), prompts[0].repeat(2, 1)
    assert torch.equal(model.generate(prompt, 20, temperature=0, state=rows), expected[0].repeat(2, 1))
    mask = torch.arange(5) >= torch.tensor([[0], [3]])
    padded = model.generate(prompt, 20, temperature=0, state=rows, key_mask=mask)
    short = model.generate(prompts[0][:, 3:], 20, temperature=0, state=state)
    assert torch.equal(
        torch.cat([padded[:1], padded[1:]]), torch.cat([expected[0], torch.cat([prompt[:1, :3], short], 1)])
    )
    assert model.generate(prompt, 70, temperature=0, state=rows)[0, :25].equal(
        expected[0][0]
    )  # in a decoder of its own


@torch.no_grad()
def test_logits_that_are_not_finite_are_named_only_where_they_are_reached():
    model, prompt = make("aft_simple"), torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = model.generate(prompt, 20, temperature=0)
    unused = next(token for token in range(40) if token not in expected)
    model.embed.weight[unused] = torch.nan

    class Bad(Drafter):
        def guess(self, row, text, most, choose):
            return [unused, unused][:most]

    assert torch.equal(model.generate(prompt, 20, temperature=0, draft=Bad()), expected)
    model.embed.weight[expected[1, 8]] = torch.nan
    first = [int((row[3:] == expected[1, 8]).nonzero()[0]) if expected[1, 8] in row[3:] else 99 for row in expected]
    with pytest.raises(MixerError) as plain:
        model.generate(prompt, 20, temperature=0)
    with pytest.raises(MixerError, match=f"LM.generate: the logits of new token {min(first) + 1} in row"):
        model.generate(prompt, 20, temperature=0, draft="ngram")
    assert f"new token {min(first) + 1} in row" in str(plain.value)


def test_what_guesses_do_not_take_is_refused_in_a_line():
    model, prompt = make("aft_simple"), torch.zeros(1, 3, dtype=torch.long)
    for draft, message in (
        ("ngrams", "LM.generate: draft='ngrams' is unknown; give 'ngram', an LM, a Drafter or None."),
        (build(spec("hydra"), vocab=30), "ModelDrafter: the models have vocabularies of 30 tokens and 40; take two"),
        (Knowing(torch.full((1, 9), 77)), "LM: tokens must be in 0..39, got"),
    ):
        with pytest.raises(MixerError) as raised:
            model.generate(prompt, 4, draft=draft)
        assert str(raised.value).startswith(message)
    still = build({"name": "routing", "heads": 2, "paper_form": True})
    with pytest.raises(MixerError, match="LM.generate: draft needs mixers that continue from a state; leave it out"):
        still.generate(prompt, 4, draft="ngram")
    with pytest.raises(MixerError, match="LM.generate: state needs mixers that continue"):
        still.generate(prompt, 4, state=model.init_state(1))
    with pytest.raises(MixerError, match="ModelDrafter: a mixer of this model cannot continue from a state"):
        model.generate(prompt, 4, draft=still)
    for options in ({"tokens": 0}, {"shortest": 0}, {"shortest": 13}):
        with pytest.raises(MixerError, match="NgramDrafter: needs tokens >= 1 and 1 <= shortest <= longest, got"):
            NgramDrafter(**options)
    with pytest.raises(MixerError, match="ModelDrafter: tokens must be at least 1, got 0"):
        ModelDrafter(model, 0)
    if cpu.available():
        with pytest.raises(MixerError, match="this decoder rounds weights to int8, and guesses are checked with"):
            model.generate(prompt, 4, draft="ngram", decoder=model.decoder(weights="int8"))
    _, state = model.prefill(torch.zeros(1, 60, dtype=torch.long))
    with pytest.raises(MixerError, match="a prompt of 63 tokens and n=4 exceed max_len=64"):
        model.generate(prompt, 4, state=state)
