"""The complete streaming mixer in docs/adding-a-mixer.md: pasted into an empty file, it keeps every promise."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import tokenmix.mixers
from tokenmix import MixerError
from tokenmix.lab.cli import main

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs/adding-a-mixer.md").read_text()
CODE = re.findall(r'^```python title="decaying.py"\n(.*?)^```', PAGE, flags=re.DOTALL | re.MULTILINE)
COMMAND = re.findall(r"^tokenmix (check decaying.*)$", PAGE, flags=re.MULTILINE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "decaying.py").write_text(CODE[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "decaying", raising=False)
    importlib.invalidate_caches()
    yield tmp_path
    sys.modules.pop("decaying", None)


def test_the_example_of_the_page_keeps_every_promise(folder, capsys):
    assert (len(CODE), len(COMMAND)) == (1, 1)
    assert main(COMMAND[0].split()) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    for promise in ("equals_reference", "accurate_on_adversarial_keys", "streaming_equals_parallel", "exports"):
        assert f"pass  {promise}\n" in out
    assert "not checked" not in out


def test_a_masked_token_at_the_end_of_a_chunk_moves_the_position_only(folder):
    from decaying import DecayingAverage

    torch.manual_seed(0)
    mixer, x = DecayingAverage(4).double(), torch.randn(1, 4, 4, dtype=torch.float64)
    mask, positions = torch.tensor([[True, True, False, True]]), torch.tensor([[0, 5, 1, 7]])
    want = mixer(x, key_mask=mask, positions=positions)[:, -1]
    _, state = mixer.extend(x[:, :3], mixer.init_state(1), key_mask=mask[:, :3], positions=positions[:, :3])
    got, _ = mixer.extend(x[:, 3:], state, positions=positions[:, 3:])
    assert torch.allclose(got[:, 0], want)
    with pytest.raises(MixerError, match="rise along each row"):
        mixer.extend(x[:, 3:], state)  # counts on from the masked token's 1, below the 5 of the last valid one
    with pytest.raises(MixerError, match="rise along each row"):
        mixer.extend(x[:, 3:], state, positions=torch.tensor([[5]]))


def test_the_helpers_are_public_and_in_the_reference():
    lines = re.findall(r"^from tokenmix.mixers import (.*)$", CODE[0], flags=re.MULTILINE)
    names = [name for line in lines for name in line.split(", ")]
    reference = (ROOT / "docs/reference/api.md").read_text()
    assert {"register_state", "chunk_positions", "check_positions"} <= set(names)
    for name in names:
        assert name in tokenmix.mixers.__all__
        assert f"::: tokenmix.mixers.{name}\n" in reference
    assert not re.findall(r"^from tokenmix\.(?!mixers import)", CODE[0], flags=re.MULTILINE)


HELPERS = [
    "register_state",
    "token_positions",
    "chunk_positions",
    "check_positions",
    "valid_mask",
    "zero_masked",
    "allowed",
    "add_projections",
    "check_heads",
    "by_head",
    "join_heads",
    "at_least_float32",
    "exact",
    "guard_nonfinite",
    "propagate_nonfinite_chunk",
    "largest_dot",
]


@pytest.mark.parametrize("name", HELPERS)
def test_a_helper_is_public_and_the_page_says_what_it_is_for(name):
    assert name in tokenmix.mixers.__all__
    assert f"::: tokenmix.mixers.{name}\n" in (ROOT / "docs/reference/api.md").read_text()
    assert re.search(rf"^\|.*`@?{name}\b.*\|.*\|$", PAGE, flags=re.MULTILINE)
