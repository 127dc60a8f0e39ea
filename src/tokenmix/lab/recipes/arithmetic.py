"""Arithmetic and sorting with the right positions (McLeish et al. 2024, arXiv 2405.17399; Cho et al. 2024, 2405.20671).

A model trained on short numbers is tested on longer ones: ``tokenmix eval RUN --lengths 1 2 4 8 16``. One recipe for
each task: ``arithmetic_addition``, ``arithmetic_multiplication``, ``arithmetic_sort``, and ``arithmetic_strings`` for
copying and its relatives (``--data reverse``).

``paper``: 16 layers of 1,024 features and 16 heads, or one such layer applied 16 times, operands of up to 20 digits.
McLeish et al. give the blocks LayerNorm behind each branch, GELU gates without biases and a head of two layers; here
they are those of today (``in_shell(..., "modern")``), as the optimiser and the number of steps are ours. ``smoke``: 4
layers x 128, operands of up to 8 digits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from ...models import LMConfig, LoopConfig, in_shell
from ...types import Options, Spec
from ..data import Synthetic
from ..train import SyntheticDataConfig
from ..train.config import RunConfig, TrainConfig
from .recipe import MUON, Recipe, shrink_spec

SHAPES: dict[str, dict[str, int]] = {
    "smoke": {"dim": 128, "heads": 4, "layers": 4, "longest": 8, "steps": 1000, "batch_size": 64},
    "gpu": {"dim": 384, "heads": 6, "layers": 8, "longest": 12, "steps": 20_000, "batch_size": 256},
    "paper": {"dim": 1024, "heads": 16, "layers": 16, "longest": 20, "steps": 40_000, "batch_size": 8192},
}
LONGEST = {  # where it is not that of the shape
    "arithmetic_multiplication": {"smoke": 3, "gpu": 6, "paper": 15},
    "arithmetic_sort": {"smoke": 4, "gpu": 6, "paper": 10},
    "arithmetic_strings": {"smoke": 20, "gpu": 20, "paper": 20},
}
MAX_LEN = 4096  # bounds nothing but mixers that have a length
VOCAB = 64
OPTIM = replace(MUON, lr=0.0015, muon_lr=0.02, decay=0.5)
DIGITS = {"digits": [0, 9], "max_len": 1024}
ABACUS, COUPLED = ({"name": name, **DIGITS} for name in ("abacus", "coupled"))
INJECTED, LOOPED = LoopConfig(inject="add", every="layer"), LoopConfig(16, inject="add")


@dataclass(frozen=True)
class ArithmeticRow:
    """A mixer, what is added to the embedding, and how the layers are applied.

    A looped row has one layer at every size, applied as often as the other rows have layers.
    """

    about: str
    mixer: Spec
    positions: Options | None = field(default_factory=lambda: ABACUS)
    loop: LoopConfig | None = None
    layers: int | None = None
    pad: bool = False
    printed: dict[str, float] = field(default_factory=dict)


def attention(**options: object) -> Spec:
    """Return softmax attention with normalised queries and keys, without positions unless the options add them."""
    return {"name": "attention", "heads": 16, "positions": None, "qk_norm": "rms", **options}


FIRE, ALIBI, T5 = ({"bias": {"name": name}} for name in ("fire", "alibi", "t5"))
ROTARY = {"positions": {"name": "rotary", "base": 10_000.0}}
ROWS = {
    "abacus": ArithmeticRow("attention, Abacus embeddings", attention()),
    "abacus_fire": ArithmeticRow("attention, Abacus and FIRE", attention(**FIRE)),
    "fire": ArithmeticRow("attention, FIRE", attention(**FIRE), None),
    "nope": ArithmeticRow("attention without positions", attention(), None),
    "rotary": ArithmeticRow("attention, rotary positions", attention(**ROTARY), None),
    "alibi": ArithmeticRow("attention, ALiBi", attention(**ALIBI), None),
    "t5": ArithmeticRow("attention, T5's buckets", attention(**T5), None),
    "abacus_injected": ArithmeticRow("Abacus, the input added before every layer", attention(), ABACUS, INJECTED),
    "abacus_looped": ArithmeticRow("Abacus, one layer applied again and again", attention(), ABACUS, LOOPED),
    "abacus_fire_looped": ArithmeticRow("Abacus and FIRE, one layer looped", attention(**FIRE), ABACUS, LOOPED),
    "fire_looped": ArithmeticRow("FIRE, one layer looped", attention(**FIRE), None, LOOPED),
    "coupled": ArithmeticRow("attention, coupled positions", attention(), COUPLED, pad=True),
    "coupled_one_layer": ArithmeticRow(
        "one layer of attention without normalised queries and keys, coupled positions",
        attention(qk_norm=None),
        COUPLED,
        layers=1,
        pad=True,
    ),
    "aft_full_fire": ArithmeticRow("AFT-full with FIRE as its w, Abacus", {"name": "aft_full", **FIRE}),
    "aft_full_alibi": ArithmeticRow("AFT-full with ALiBi as its w, Abacus", {"name": "aft_full", **ALIBI}),
    "aft_local_t5": ArithmeticRow("AFT-local with T5's buckets, Abacus", {"name": "aft_local", "window": 16, **T5}),
    "aft_simple": ArithmeticRow("AFT-simple, Abacus", {"name": "aft_simple"}),
    "aft_forget": ArithmeticRow("AFT-forget, Abacus", {"name": "aft_forget"}),
    "gated_delta": ArithmeticRow(
        "Gated DeltaNet whose writes may reflect, Abacus", {"name": "gated_delta", "heads": 16, "negative": True}
    ),
    "mamba2": ArithmeticRow("Mamba-2, Abacus", {"name": "mamba2", "heads": 16, "state_dim": 64}),
    "linear": ArithmeticRow("linear attention, Abacus", {"name": "linear", "heads": 16}),
    "hydra": ArithmeticRow("Hydra, Abacus", {"name": "hydra"}),
}


def build(row: ArithmeticRow, size: str, *, name: str, task: str) -> RunConfig:
    """Return the config of a row at a size."""
    at = SHAPES[size]
    longest = LONGEST.get(name, {}).get(size, at["longest"])
    tasks = ("copy", "reverse", "parity", "selective_copy", "passkey") if task == "copy" else (task,)
    room = max(Synthetic(each, MAX_LEN, VOCAB, longest=longest).longest_row() for each in tasks)
    data = SyntheticDataConfig(task, seq_len=room, longest=longest, pad=row.pad)
    mixer = shrink_spec(row.mixer, seq_len=MAX_LEN, heads=at["heads"], rank=None)
    layers = row.layers or (1 if row.loop is not None and row.loop.times > 1 else at["layers"])
    loop = row.loop if row.loop is None or row.loop.times == 1 else replace(row.loop, times=at["layers"])
    model = LMConfig(
        dim=at["dim"],
        max_len=MAX_LEN,
        mixers=(mixer,),
        layers=layers,
        vocab=VOCAB,
        positions=row.positions,
        loop=loop,
    )
    every = at["steps"] // 4
    train = TrainConfig(
        steps=at["steps"], batch_size=at["batch_size"], eval_every=every, eval_batch=64, save_every=every
    )
    model = in_shell(model, "modern")
    return RunConfig(replace(model, positions=row.positions), data, OPTIM, train)


def recipe(task: str, about: str, name: str) -> Recipe:
    """Return the recipe of a task."""
    return Recipe(name, about, ROWS, "abacus_fire_looped", partial(build, name=name, task=task))


RECIPES = (
    recipe("addition", "sums of two numbers, tested on longer ones than those trained", "arithmetic_addition"),
    recipe("multiplication", "products of two numbers", "arithmetic_multiplication"),
    recipe("sort", "numbers sorted", "arithmetic_sort"),
    recipe("copy", "strings copied or reversed, parity, and what a long text hides", "arithmetic_strings"),
)
