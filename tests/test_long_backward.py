"""long_backward: the gradient of the whole sequence, chunk by chunk, and over any kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tokenmix
from tokenmix import MixerError
from tokenmix.models import LM, LMConfig

MIXERS = {
    "aft_simple": {"name": "aft_simple"},
    "aft_forget": {"name": "aft_forget"},
    "aft_local": {"name": "aft_local", "window": 5, "bias": {"name": "kerple"}},
    "rfa": {"name": "rfa", "heads": 2, "gate": True},
    "hydra": {"name": "hydra"},
    "lightconv": {"name": "lightconv", "heads": 2, "kernel_size": 3},
}


def model_of(*names: str, dtype=torch.float64, dim: int = 16) -> LM:
    torch.manual_seed(0)
    mixers = tuple(MIXERS[name] for name in names)
    return LM(LMConfig(dim=dim, layers=len(names), vocab=11, mixers=mixers, max_len=64, positions=None)).to(dtype)


def tokens_of(T: int, rows: int = 2) -> torch.Tensor:
    return torch.randint(0, 11, (rows, T + 1), generator=torch.Generator().manual_seed(1))


def ordinary(model: LM, tokens: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and gradients of all tokens at once."""
    model.zero_grad()
    _, T = tokens[:, 1:].shape
    logits, _ = model.extend(tokens[:, :-1], model.init_state(len(tokens)))
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def difference(model: LM, want: dict[str, torch.Tensor]) -> float:
    """The largest difference relative to the largest gradient."""
    largest = max(float(g.abs().max()) for g in want.values())
    return max(float((p.grad - want[name]).abs().max()) for name, p in model.named_parameters()) / largest


@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("kept", [1 << 26, 0])
def test_equals_the_ordinary_backward(name, kept, monkeypatch):
    """With the state at every boundary, and with every sqrt(n)-th."""
    monkeypatch.setattr(sys.modules["tokenmix.parallel.long_backward"], "KEPT", kept)
    model, tokens = model_of(name, name), tokens_of(50)
    loss, want = ordinary(model, tokens)
    model.zero_grad()
    for chunk in (7, 50, 64):
        model.zero_grad()
        found = tokenmix.long_backward(model, tokens, chunk=chunk)
        assert found.loss == pytest.approx(loss, abs=1e-12)
        assert found.targets == 100
        assert difference(model, want) < 1e-12
        assert found.norm == pytest.approx(sum(float(g.square().sum()) for g in want.values()) ** 0.5)
    tokenmix.long_backward(model, tokens, chunk=9)
    assert difference(model, {name: 2 * g for name, g in want.items()}) < 1e-12  # added to what was there


def test_watch_is_told_of_every_chunk():
    """What the chunks add is the gradient, and the losses are those of the chunks."""
    model, tokens, steps = model_of("aft_forget", "hydra"), tokens_of(50), []
    found = tokenmix.long_backward(model, tokens, chunk=20, watch=steps.append)
    assert [(s.backward, s.start, s.stop) for s in steps[:2]] == [(False, 0, 20), (False, 20, 40)]
    assert [(s.backward, s.start, s.stop) for s in steps[2:]] == [(True, 40, 50), (True, 20, 40), (True, 0, 20)]
    assert steps[0].loss is steps[0].norm is None
    assert sum(s.loss for s in steps[2:]) == pytest.approx(100 * found.loss)
    alone = model_of("aft_forget", "hydra")
    logits, _ = alone.extend(tokens[:, :-1], alone.init_state(2))
    last = F.cross_entropy(logits[:, 40:].flatten(0, 1), tokens[:, 41:].flatten(), reduction="sum")
    state = alone.extend(tokens[:, :40], alone.init_state(2))[1]
    logits, _ = alone.extend(tokens[:, 40:-1], torch.utils._pytree.tree_map(torch.Tensor.detach, state))
    own = F.cross_entropy(logits.flatten(0, 1), tokens[:, 41:].flatten(), reduction="sum")
    assert steps[2].loss == pytest.approx(float(last.detach()))
    grads = torch.autograd.grad(own, list(alone.parameters()))
    assert steps[2].norm == pytest.approx(float(sum(g.square().sum() for g in grads)) ** 0.5)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_64k_tokens(dtype, limit):
    mixers = "aft_simple", "hydra", "aft_forget"
    model, tokens = model_of(*mixers, dtype=dtype, dim=8), tokens_of(65536, rows=1).to(torch.uint8)
    exact = model_of(*mixers, dim=8)
    loss, want = ordinary(exact, tokens.long())
    found = tokenmix.long_backward(model, tokens, chunk=4096)
    assert found.loss == pytest.approx(loss, abs=1e-6)
    assert difference(model, want) < limit


KILLED = """
import os, signal, sys
import tokenmix, torch
from test_long_backward import model_of, tokens_of

torch.set_num_threads(1)
room = sys.modules["tokenmix.parallel.long_backward"]
room.KEPT, write = 0, room.whole_file


class Dying:  # SIGKILL inside the given write
    def __init__(self, path): self.whole = write(path)
    def __enter__(self):
        global left
        self.file, left = self.whole.__enter__(), left - 1
        if left == 0:
            self.file.write(b"half")
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.file
    def __exit__(self, *why): return self.whole.__exit__(*why)


room.whole_file = Dying
for name, writes in (("whole", [-1]), ("killed", [1, 1, 2, 3, 2, 2, 3, 2, 2, 2, 2, 2, 2, -1])):
    died = 0
    for left in writes:
        if not (child := os.fork()):
            model = model_of("aft_forget", "aft_local", dtype=torch.float32)
            found = tokenmix.long_backward(
                model, tokens_of(60), chunk=3, save=os.path.join(sys.argv[1], name), save_every=4
            )
            grads = torch.cat([p.grad.flatten() for p in model.parameters()]).view(torch.int32).tolist()
            print(found.loss.hex(), found.norm.hex(), grads, flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        died += 1
    print(name, died, status, flush=True)
"""


def test_killed_at_any_write_it_gives_the_same_bits(tmp_path):
    """SIGKILL inside the first, the second, .. write of one folder, until it finishes; children of one process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    whole, said, killed, count = done.stdout.splitlines()
    assert said == "whole 0 0"
    name, died, status = count.split()
    assert (name, status) == ("killed", "0")
    assert int(died) >= 6
    assert killed == whole


def test_a_finished_folder_gives_its_result_again_and_refuses_another_call(tmp_path):
    model, tokens = model_of("aft_simple"), tokens_of(20)
    first = tokenmix.long_backward(model, tokens, chunk=6, save=tmp_path)
    model.zero_grad()
    assert tokenmix.long_backward(model, tokens, chunk=6, save=tmp_path) == first
    for other in ({"chunk": 5}, {"tokens": tokens + 0 * tokens - (tokens > 3).long()}):
        with pytest.raises(MixerError, match="holds the progress of another call"):
            tokenmix.long_backward(model, **{"tokens": tokens, "chunk": 6, "save": tmp_path, **other})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"chunk": 0}, "chunk must be a positive integer, got 0"),
        ({"save_every": 0}, "save_every must be a positive integer, got 0"),
        ({"tokens": torch.zeros(1, 1, dtype=torch.long)}, "needs integer tokens"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.long)}, "needs integer tokens"),
        ({"model": torch.nn.Linear(2, 2)}, "Linear has no init_state and extend"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(given, said):
    with pytest.raises(MixerError, match=said) as caught:
        tokenmix.long_backward(**{"model": model_of("aft_simple"), "tokens": tokens_of(4), **given})
    assert "\n" not in str(caught.value)


def test_dropout_is_refused_in_training():
    config = LMConfig(dim=8, layers=1, vocab=11, mixers=({"name": "aft_simple"},), max_len=64, dropout=0.1)
    with pytest.raises(MixerError, match=r"call model.eval\(\) first"):
        tokenmix.long_backward(LM(config), tokens_of(4))
