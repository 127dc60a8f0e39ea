"""Compute one exact gradient through a whole text as a single sequence, and how far back its losses reach.

    python -m benchmarks.long_gradient RUN TEXT --save FOLDER [--bytes N] [--record]

RUN is the directory of a trained byte model whose mixers keep states of constant size; TEXT is a file, plain or gzip.
The text is one sequence: nothing is truncated and no state is reset. The run may be killed at any time; the same
command goes on. It prints

- the mean loss, the norm of the gradient, and the largest memory of the process;
- over the first 2^20 bytes, the norm of the gradient that stops at the boundaries of stretches, as in truncated
  backpropagation, and the cosine of its angle with the exact one;
- the norm of what the bytes at some distance add to the gradient of the losses of the 4,096 last of those bytes, as a
  share of what these add themselves.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tokenmix import long_backward
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.train import load_run
from tokenmix.parallel import LongStep

RECORD = Path(__file__).parent / "results" / "long_gradient.json"
STRETCHES = (256, 1024, 4096, 16384, 65536)
SAMPLE, CHUNK = 2**20, 4096
BITS = 0.6931471805599453  # nats


def text_of(path: Path, folder: Path) -> Tensor:
    """Return the bytes of a file (1, N), mapped; a gzip file is unpacked into ``folder`` first."""
    if path.suffix == ".gz":
        plain = folder / "text"
        if not plain.exists():
            half = folder / "text.part"
            with gzip.open(path) as source, half.open("wb") as target:
                shutil.copyfileobj(source, target)
            half.rename(plain)
        path = plain
    return torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)[None]


class Watch:
    """Print where the run is, twice a minute."""

    def __init__(self, tokens: int):
        self.tokens, self.began, self.said = tokens, time.monotonic(), 0.0

    def __call__(self, step: LongStep) -> None:
        """Be told of a chunk."""
        now = time.monotonic()
        if now - self.said < 30:
            return
        self.said = now
        done = self.tokens - step.start if step.backward else step.stop
        kind = "backward" if step.backward else "forward"
        print(f"{kind} {done / self.tokens:.1%} of {self.tokens:,} bytes, {now - self.began:,.0f} s", file=sys.stderr)


def gradient(model: Any) -> Tensor:
    """Return the gradients of all parameters as one vector, and reset them."""
    flat = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return flat


def truncated(model: Any, tokens: Tensor, stretch: int) -> Tensor:
    """Return the gradient of the mean loss that stops where stretches meet; states are passed on."""
    state, T = model.init_state(1), tokens.shape[1] - 1
    for start in range(0, T, stretch):
        part = tokens[:, start : start + stretch + 1].long()
        logits, state = model.extend(part[:, :-1], state)
        state = pytree.tree_map(torch.Tensor.detach, state)
        (F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum") / T).backward()
    return gradient(model)


def reach(model: Any, tokens: Tensor) -> dict[int, float]:
    """Return by distance, in bytes, what earlier tokens add to the gradient of the last chunk's losses."""
    asked: list[LongStep] = []

    def last_only(logits: Tensor, targets: Tensor) -> Tensor:
        own = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return own if not asked else 0.0 * own

    found: dict[int, float] = {}

    def watch(step: LongStep) -> None:
        if step.backward and step.norm is not None:
            asked.append(step)
            found[asked[0].start - step.start] = step.norm / asked[0].norm  # type: ignore[operator]  # of the backward pass

    long_backward(model, tokens, chunk=CHUNK, loss=last_only, watch=watch)
    model.zero_grad(set_to_none=True)
    return {CHUNK * 4**i: found[CHUNK * 4**i] for i in range(20) if CHUNK * 4**i in found}


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--save", type=Path, required=True, help="folder of the progress")
    parser.add_argument("--bytes", type=int, help="read no more of the text")
    parser.add_argument("--record", action="store_true", help=f"keep the numbers in {RECORD.name}")
    asked = parser.parse_args()
    asked.save.mkdir(parents=True, exist_ok=True)
    model = load_run(asked.run)[0].eval()
    tokens = text_of(asked.text, asked.save)[:, : asked.bytes]
    resumed = (asked.save / "progress").exists()
    began, busy = time.monotonic(), time.process_time()
    found = long_backward(
        model, tokens, chunk=CHUNK, save=asked.save / "progress", save_every=256, watch=Watch(tokens.shape[1])
    )
    numbers: dict[str, Any] = {
        "bytes": tokens.shape[1],
        "bits_per_byte": found.loss / BITS,
        "gradient_norm": found.norm,
        "resumed": resumed,  # then the seconds are those since the last start
        "seconds": time.monotonic() - began,
        "processor_seconds": time.process_time() - busy,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    model.zero_grad(set_to_none=True)
    sample = tokens[:, : SAMPLE + 1]
    exact = long_backward(model, sample, chunk=CHUNK)
    whole = gradient(model)
    numbers["sample"] = {"bits_per_byte": exact.loss / BITS, "gradient_norm": exact.norm, "truncated": {}}
    for stretch in STRETCHES:
        g = truncated(model, sample, stretch)
        cosine = float(g @ whole / (g.norm() * whole.norm()))
        numbers["sample"]["truncated"][stretch] = {"norm": float(g.norm()), "cosine": cosine}
    numbers["sample"]["reach"] = reach(model, sample)
    print(json.dumps(numbers, indent=1))
    if asked.record:
        RECORD.write_text(json.dumps({"machine": machine(), **numbers}, indent=1) + "\n")


if __name__ == "__main__":
    main()
