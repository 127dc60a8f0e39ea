"""Measure what ``tokenmix.keep_memory()`` changes: ``python -m benchmarks.memory_settings [--model]``.

Each setting has processes of its own: glibc's default, ``keep_memory()``, and the same thresholds given by environment
variables before the process starts. In each, fused attention and five mixers take turns, forward with backward: wall
clock on two threads, processor time on one. Beside the ratios stand the page faults of a call, and the resident memory
after everything is freed. ``--model`` trains models of 24 layers of 256 features at 4,096 tokens instead.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.whole_models import language

from tokenmix import keep_memory
from tokenmix.lab.bench.cases import BenchSubject, prepare
from tokenmix.lab.bench.flops import Setting
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.bench.timing import measure, sampler
from tokenmix.system.machine import process_memory
from tokenmix.system.malloc import ENVIRONMENT

RESULTS = Path(__file__).parent / "results"
SUBJECTS = (
    BenchSubject("sdpa"),
    BenchSubject("aft_simple"),
    BenchSubject("hydra", {"causal": False}),
    BenchSubject("aft_local", {"window": 32}),
    BenchSubject("linear"),
    BenchSubject("aft_full"),
)
MODELS = ("attention, fused SDPA", "aft_simple", "hydra", "aft_local 32", "linear", "aft_full")
SETTING = Setting("op", 4096, batch=4, dim=512, heads=8, backward=True)
SETTINGS = ("default", "keep_memory", "environment")
THREADS = (2, 1)


def faults() -> int:
    """Return the page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def calls(model: bool) -> dict[str, Callable[[], Any]]:
    """Return one call of each subject: a functional form with its gradients, or a step of training."""
    if model:
        return language(4096, 1, MODELS)
    return {subject.label: prepare(subject, SETTING).call for subject in SUBJECTS}


def measure_here(keep: bool, threads: int, model: bool, budget: float) -> dict[str, Any]:
    """Measure all subjects in this process, with one setting."""
    torch.set_num_threads(threads)
    if keep and not keep_memory():
        raise SystemExit("keep_memory() has no effect here; `tokenmix doctor` says why.")
    subjects = calls(model)
    times = measure({name: sampler(call) for name, call in subjects.items()}, budget=budget)
    faulted = {}
    for name, call in subjects.items():
        before = faults()
        call()
        faulted[name] = faults() - before
    first = next(iter(times.values()))
    rows = {
        name: {
            "wall_s": t.wall,
            "cpu_s": t.cpu,
            "of_attention": first.wall / t.wall if threads > 1 else first.cpu / t.cpu,
            "page_faults": faulted[name],
        }
        for name, t in times.items()
    }
    subjects.clear()
    gc.collect()
    resident = process_memory("VmRSS") or 0
    keep_memory(False)
    after = process_memory("VmRSS") or 0
    return {"machine": machine(), "rows": rows, "resident_MiB": resident / 2**20, "after_reset_MiB": after / 2**20}


def measure_apart(setting: str, threads: int, model: bool, budget: float) -> dict[str, Any]:
    """Measure one setting in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.memory_settings", "--here", "--threads", str(threads)]
    command += ["--budget", str(budget)] + ["--model"] * model + ["--keep"] * (setting == "keep_memory")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_") and k != "GLIBC_TUNABLES"}
    environment |= ENVIRONMENT if setting == "environment" else {}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def show(found: dict[str, Any]) -> None:
    """Print one measurement."""
    for name, row in found["rows"].items():
        print(
            f"  {name:28} {row['wall_s'] * 1e3:9,.1f} ms wall {row['cpu_s'] * 1e3:9,.1f} ms CPU "
            f"{row['of_attention']:7.2f}x  {row['page_faults']:9,} page faults"
        )
    print(f"  resident after freeing {found['resident_MiB']:,.0f} MiB, after the reset {found['after_reset_MiB']:,.0f}")


def main() -> None:
    """Measure all settings, or with ``--here`` one in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="train whole models instead of functional forms")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of measuring in each process")
    parser.add_argument("--here", action="store_true", help="measure one setting in this process, and print it as JSON")
    parser.add_argument("--keep", action="store_true", help="with --here: call keep_memory() first")
    parser.add_argument("--threads", type=int, default=2, help="with --here")
    given = parser.parse_args()
    if given.here:
        print(json.dumps(measure_here(given.keep, given.threads, given.model, given.budget)))
        return
    name = "memory_settings_model" if given.model else "memory_settings"
    size = (
        "24 layers of 256 features, 4,096 tokens, batch 1, a step of training"
        if given.model
        else ("4,096 tokens, batch 4, 512 features, 8 heads, forward with backward; one thread by processor time")
    )
    found: dict[str, Any] = {"setting": f"{size}, float32", "memory": {}}
    for threads in THREADS[:1] if given.model else THREADS:
        for setting in SETTINGS:
            measured = measure_apart(setting, threads, given.model, given.budget)
            print(f"{setting}, {threads} thread{'s' * (threads > 1)}")
            show(measured)
            here = measured.pop("machine")
            found.setdefault("machine", here | {"allocator": here["allocator"].split(",")[0]})
            found["memory"][f"{setting}, {threads}"] = measured
            RESULTS.joinpath(f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
