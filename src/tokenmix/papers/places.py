"""Measures of positions: where digits, and tokens in training, are taken to stand."""

from __future__ import annotations

from collections.abc import Callable

import torch


def abacus_offset() -> int:
    """Return the largest offset that Abacus embeddings draw at their defaults."""
    from ..positions import AbacusPositions

    return AbacusPositions(2).max_offset - 1


def abacus_places() -> str:
    """Return the rows of Abacus embeddings for the characters of a sum, in evaluation."""
    from ..positions import AbacusPositions

    text = torch.tensor([list(b"12+345=753")])
    places = AbacusPositions(2, max_len=128).double().eval()
    with torch.no_grad():
        places.weight[:, 0] = torch.arange(128)
    found, _ = places(text, None, torch.zeros(1, dtype=torch.long))
    return " ".join(str(int(row)) for row in found[0, :, 0].tolist())


def abacus_parameters(layers: int) -> float:
    """Compute the parameters (in millions) of the paper's model with a given number of layers.

    Of each layer, with D = 1024: attention 4 D^2, a gated MLP of inner width 1024 3 D^2, two LayerNorms 4 D; besides
    those a head of 3 D^2, 1,024 rows of Abacus embeddings, embedding and decoder of 118 symbols, two LayerNorms. No
    biases.
    """
    width = 1024
    layer = 7 * width**2 + 4 * width
    return (layers * layer + 3 * width**2 + 1024 * width + 2 * 118 * width + 4 * width) / 1e6


def fire_width() -> int:
    """Return the hidden width of FIRE's MLP at its defaults."""
    from ..positions import Fire

    return Fire(1).hidden


def sampled(name: str) -> Callable[[], str]:
    """Return a measure of the positions that a sampler draws for four tokens of at most eight."""

    def measure() -> str:
        from ..positions import SAMPLERS

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            rows = SAMPLERS[name](torch.arange(4).expand(2000, -1), 8)
        gaps = (rows.diff(dim=1) > 1).sum(1)
        rises = bool((rows.diff(dim=1) > 0).all()) and int(rows.min()) >= 0 and int(rows.max()) < 8
        kinds = {"offset": int(gaps.max()) == 0, "pose": int(gaps.max()) == 1, "randomised": int(gaps.max()) > 1}
        return f"{len(rows.unique(dim=0))} rows" if rises and kinds[name] else "not as described"

    return measure
