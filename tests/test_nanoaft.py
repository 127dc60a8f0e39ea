"""Test that examples/nanoaft.py computes what the library computes, sees no future, learns, and streams."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

import nanoaft
from tokenmix.models import LM, LMConfig

DIM, LAYERS, T = 32, 2, 70
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def small() -> nanoaft.Model:
    torch.manual_seed(0)
    model = nanoaft.Model(dim=DIM, layers=LAYERS)
    for p in model.parameters():  # off the start, where the convolution is the identity and biases are 0
        p.data += 0.1 * torch.randn_like(p)
    return model


def name_in_the_library(name: str) -> str:
    return name.replace(".up.", ".mlp.up.").replace(".down.", ".mlp.down.").replace(".conv", ".conv.weight")


def as_in_the_library(name: str, a: Tensor) -> Tensor:
    return a[:, 0].T if name.endswith(".conv") else a


@pytest.fixture
def both() -> tuple[nanoaft.Model, LM]:
    """A model of the file and one of the library with the same weights."""
    model = small()
    spec = {"name": "aft_forget", "norm_heads": 8, "kernel_size": 4, "decay": "fixed", "key_norm": False}
    twin = LM(LMConfig(dim=DIM, max_len=T, mixers=(spec,), layers=LAYERS, positions=None))
    weights = {name_in_the_library(n): as_in_the_library(n, a) for n, a in model.state_dict().items()}
    twin.load_state_dict(weights)
    return model, twin


def some_bytes(rows: int = 2, length: int = T) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


def test_forward_and_gradients_are_those_of_the_library(both):
    model, twin = both
    tokens = some_bytes()
    ours, _ = model(tokens)
    theirs = twin(tokens)
    torch.testing.assert_close(ours, theirs, **CLOSE)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(2))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    found = {name_in_the_library(n): as_in_the_library(n, p.grad) for n, p in model.named_parameters()}
    for name, p in twin.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-3, msg=name)


def test_streaming_is_the_parallel_form_and_that_of_the_library(both):
    model, twin = both
    tokens = some_bytes()
    whole, _ = model(tokens)
    state, theirs, parts = None, twin.init_state(2), []
    for chunk in tokens.split([1, 3, 1, 40, 25], 1):
        logits, state = model(chunk, state)
        expected, theirs = twin.extend(chunk, theirs)
        torch.testing.assert_close(logits, expected, **CLOSE)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


def test_no_byte_sees_the_future():
    model, tokens = small(), some_bytes()
    changed = tokens.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 256
    torch.testing.assert_close(model(changed)[0][:, :40], model(tokens)[0][:, :40], rtol=0, atol=0)
    assert not torch.allclose(model(changed)[0][:, 40], model(tokens)[0][:, 40])


def test_any_finite_keys_are_safe():
    k, v = torch.zeros(1, 4, 1), torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1)
    k[0, 3] = 1e4
    mean, m, sums = nanoaft.decayed_mean(k, v, torch.zeros(1), torch.full((1, 1), -torch.inf), torch.zeros(1, 2, 1))
    assert mean.flatten().tolist() == [1.0, 1.5, 2.0, 4.0]
    assert m.isfinite().all()
    assert sums.isfinite().all()


def test_the_state_has_one_size_and_writing_keeps_the_prompt():
    model = small()
    sizes = {nanoaft.size(model(some_bytes(1, length))[1]) for length in (1, 10, 200)}
    assert len(sizes) == 1
    out = nanoaft.write(model, b"def ", 5)
    assert out[:4] == b"def "
    assert len(out) == 9


def test_a_few_steps_of_training_lower_the_loss(capsys):
    torch.manual_seed(0)
    text = torch.tensor(list(b"the quick brown fox jumps over the lazy dog, and " * 60), dtype=torch.uint8)
    model = nanoaft.Model(dim=DIM, layers=1)
    nanoaft.train(model, text, steps=12, rows=4, length=32)
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines()]
    assert losses[0] > 7
    assert losses[-1] < losses[0] - 2


def test_a_text_file_is_read_as_bytes(tmp_path):
    (tmp_path / "some.txt").write_bytes(b"a\xff\n")
    assert nanoaft.read_text(str(tmp_path / "some.txt")).tolist() == [97, 255, 10]


def test_it_needs_torch_only_and_fits_on_a_few_screens():
    import sys

    text = Path(nanoaft.__file__).read_text()
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {(n.module if isinstance(n, ast.ImportFrom) else n.names[0].name).split(".")[0] for n in imports}
    assert names - set(sys.stdlib_module_names) == {"torch"}
    assert text.count("\n") <= 250
