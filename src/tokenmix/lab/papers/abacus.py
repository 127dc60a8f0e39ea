"""Transformers Can Do Arithmetic with the Right Embeddings: Abacus embeddings."""

from __future__ import annotations

from . import places
from .claim import TOO_LARGE, Claim, Number, Paper, Trial, stated
from .rows import trained

SECOND_HAND, OFFICIAL = "second-hand", "official code"


def reversed_sums() -> int:
    """Count the held-out sums of our data that are none, read with the least digit first."""
    from ..data import Synthetic, text_of

    wrong = 0
    for row in Synthetic("addition", 4096, 64, longest=8).held_out("valid", 200)[0]:
        asked, _, answer = text_of(row).partition(";")[0].partition("=")
        wrong += sum(int(number[::-1]) for number in asked.split("+")) != int(answer[::-1])
    return wrong


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*encoding(), *sums(), *comparisons())


def encoding() -> tuple[Claim, ...]:
    """Return the claims of what stands in the text, and of the embeddings' ids."""
    return (
        Claim(
            "Data",
            "Operands and answers are written with the least digit first, without padding or spaces.",
            (
                Number("98282 + 3859172 = ", "2787472", why="an example; below are the sums of our data"),
                Number("sums of our data that are wrong so read", "0", measure=reversed_sums, derived=True),
            ),
            code="lab.data.synthetic.Synthetic",
        ),
        Claim(
            "Abacus embeddings",
            "Each digit learns its place within its number: 1, 2, 3 .. in each run of digits, 0 elsewhere; in training "
            "one random offset is added to all of them.",
            (
                Number("rows for 12+345=753 in evaluation", "1 2 0 1 2 3 0 1 2 3", measure=places.abacus_places),
                Number("largest offset", "99", measure=stated(places.abacus_offset), source=OFFICIAL),
            ),
            "id = place in the run of digits + k",
            "positions.digits.AbacusPositions",
        ),
    )


def sums() -> tuple[Claim, ...]:
    """Return the claims of trained models on addition."""
    return (
        Claim(
            "Addition",
            "Trained on at most 20 digits; with the embeddings, input injection and one looped block solve longer "
            "sums.",
            (
                *trained(
                    {
                        "out of distribution, Abacus": "92.9",
                        "with injection and looping": "99.1",
                        "100 digits": "99",
                    },
                    "%",
                ),
                *trained({"longest generalisation, digits": "120", "the same, times": "6"}),
                Number("errors removed", "87", "%", why="the two printed rows give 87.3", without=TOO_LARGE),
            ),
            code="lab.recipes.arithmetic.build",
            small="quality.md#sums-longer-than-those-of-training",
            trials=(
                Trial("addition", "abacus", "better", "fire"),
                Trial("addition", "abacus_looped", "better", "abacus"),
            ),
        ),
        Claim(
            "Input injection and looping",
            "Injection of the input alone halves the errors of generalisation, and so do eight layers run twice "
            "against sixteen.",
            trained({"injection alone": "about 50", "8 x 2 against 16 x 1": "about 50"}, "% fewer"),
            code="models.looped.Loop",
            small="quality.md#eight-applications-by-the-size-of-the-block",
            trials=(
                Trial("addition", "abacus_injected", "better", "abacus"),
                Trial("addition_blocks", "4 layers, 2 times", "better", "8 layers"),
            ),
        ),
    )


def comparisons() -> tuple[Claim, ...]:
    """Return the claims of sizes, of other positions and of sorting."""
    return (
        Claim(
            "Table 3, parameters",
            "Sixteen layers with Abacus and injection; looping one layer needs a tenth of them.",
            (
                Number("16 x 1", "122", "M", stated(lambda: places.abacus_parameters(16)), SECOND_HAND),
                Number(
                    "1 x 16, share of them",
                    "10",
                    "%",
                    stated(lambda: 100 * places.abacus_parameters(1) / places.abacus_parameters(16)),
                    "recomputed from the paper's layers",
                ),
            ),
        ),
        Claim(
            "FIRE and NoPE",
            "The relative bias FIRE, and no positions at all, are what the embeddings are compared with.",
            (Number("FIRE, hidden width", "32", measure=stated(places.fire_width), source=OFFICIAL),),
            "b(i, j) = MLP(log(|c (i - j)| + 1) / log(|c max(i, L)| + 1))",
            "positions.pair.Fire",
        ),
        Claim(
            "Tables 1 and 2, sorting",
            "Sorting gains from the embeddings too; the numbers are not at hand.",
            trained({"accuracies": "not at hand"}),
            code="lab.recipes.arithmetic.build",
            small="quality.md#products-and-sorted-numbers",
            trials=(Trial("sort", "abacus", "better", "fire"),),
        ),
    )


PAPER = Paper(
    "abacus",
    "Transformers Can Do Arithmetic with the Right Embeddings",
    "McLeish et al. 2024",
    "2405.17399",
    state,
)
