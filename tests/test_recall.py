"""The task of associative recall asks what it says."""

from __future__ import annotations

import pytest
import torch

from tokenmix import MixerError
from tokenmix.lab.data import recall_batch


def test_every_key_is_asked_once_for_its_value():
    tokens, targets = recall_batch(50, seq_len=40, pairs=6, vocab=32, generator=torch.Generator().manual_seed(0))
    for row, asked in zip(tokens.tolist(), targets.tolist(), strict=True):
        known = dict(zip(row[:12:2], row[1:12:2], strict=True))
        assert len(known) == 6
        assert all(1 <= k <= 15 for k in known)
        assert all(16 <= v <= 31 for v in known.values())
        found = {row[i]: asked[i] for i in range(40) if asked[i] != -100}
        assert found == known
        assert all(asked[i] == -100 for i in range(12))
        assert sorted(row[12:]) == sorted([0] * 22 + list(known))


def test_it_depends_on_the_generator_alone():
    a, b, c = (
        recall_batch(3, seq_len=20, pairs=3, vocab=16, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(a[0], b[0])
    assert torch.equal(a[1], b[1])
    assert not torch.equal(a[0], c[0])


@pytest.mark.parametrize("wrong", [{"seq_len": 17}, {"vocab": 12}, {"pairs": 0}])
def test_what_does_not_fit_is_refused(wrong):
    with pytest.raises(MixerError, match="recall_batch"):
        recall_batch(1, **{"seq_len": 18, "pairs": 6, "vocab": 13, "generator": torch.Generator(), **wrong})
