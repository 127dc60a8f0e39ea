"""Attention explained: two introductory articles, on attention and on its heads."""

from __future__ import annotations

from typing import Any

from . import identities
from .claim import TOO_LARGE, Claim, Number, Paper
from .counts import layer
from .rows import trained

GRAMMAR = "tokenmix look sentence runs/grammar"
MILK = (
    "in the encoder of `tokenmix train grammar --out runs/grammar` (attention, 2 layers of 4 heads, one seed, "
    "indicative) the order is the opposite in both layers: milk's query has mean products of -2.23 with drank, -0.94 "
    "with cat and 1.44 with black, and mean weights of 0.08, 0.13 and 0.21"
)


def query_size() -> int:
    """Return the width of one head in a model of 6 features and 2 heads."""
    from ...mixers import build_mixer

    mixer: Any = build_mixer("attention", 6, heads=2)
    return int(mixer.q_proj.out_features // mixer.heads)


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    open_questions = {
        "why products of queries and keys": "a question",
        "what queries, keys and values come to mean": "a question",
        "what a head gains": "a question",
    }
    return (
        Claim(
            "First article, attention",
            "Each word goes through learned maps; the products of queries and keys are factors for pairs of words, and "
            "a word's output is the sum of the values with these factors.",
            (Number("our form against the equation", "equal", measure=identities.attention),),
            "softmax(Q K^T / sqrt(d)) V",
            "functional.attention.attention",
        ),
        Claim(
            "Second article, sizes of the example",
            "A model of 6 features and 2 heads has queries of 3 features, and one linear layer each for all heads.",
            (
                Number("query size, features over heads", "3", measure=query_size),
                Number("weights of the four layers, 4 x 6 x 6", "144", measure=four_layers, derived=True),
            ),
            code="mixers.attention.Attention",
        ),
        Claim(
            "Second article, heads",
            "The heads are cut out of the whole queries, keys and values, work apart, and are put side by side again.",
            (Number("two heads at once, and one by one", "equal", measure=identities.heads_are_cuts),),
            code="functional.attention.attention",
        ),
        Claim(
            "Second article, masks",
            "In the decoder a word must not see the words after it.",
            (Number("first outputs when the last token changes", "equal", measure=identities.future_is_hidden),),
            code="functional.attention.attention",
        ),
        Claim(
            "First article, examples",
            "Of 'The black cat drank the milk', the factor of milk and drank should be high, that of milk and cat "
            "lower, and that of milk and black near zero.",
            (Number("order of the three factors", "a direction", why=MILK, without=TOO_LARGE),),
            code="lab.explain.collect.explain",
            command=GRAMMAR + ' --text "The black cat drank the milk"',
        ),
        Claim(
            "Questions left open",
            "Why products at all, what the three maps come to mean, what a head gains. No number is claimed. `tokenmix "
            "explain` shows the products of a model (`tokenmix train grammar --out runs/grammar`), what its maps make "
            "of each word, and what it loses without each head.",
            trained(open_questions),
            code="lab.explain.collect.explain",
            command=GRAMMAR + ' --text "The ball is blue"',
        ),
    )


def four_layers() -> int:
    """Count the weights of queries, keys, values and outputs for 6 features."""
    return layer("attention", 6, heads=2, qkv_bias=False, out_bias=False)


PAPER = Paper("explained", "Attention explained: two introductory articles", "", "", state)
