"""Run the contract suite on a CUDA machine, on every row of tests/cases.py, the rows with kernels first.

    python -m benchmarks.gpu_contract --processes 12  # writes benchmarks/results/<machine>_contract.json

Inputs and weights are drawn on the CPU and computed with on the GPU by the default backend: kernels where there are
any. The equation is computed in float64 on the GPU. With ``--seconds`` rows that were not reached are named.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SKIPPED = (
    "compiles",  # a default device is a mode that torch.compile does not trace through
    "exports",  # what these two export is compared on the CPU
    "exports_to_onnx",
)
MOVED = 1e-4  # of the largest output, in float32
FIRST = ("aft_", "hydra", "linear", "external", "attention")


def moved(s: Any) -> list[str]:
    """Compare a float32 mixer moved to the GPU, where no default device helps it, with itself on the CPU."""
    import torch

    from tokenmix import MixerError
    from tokenmix.testing import inputs

    mixer, x = s.build(dtype=torch.float32), s.x(dtype=torch.float32)
    there = copy.deepcopy(mixer).to("cuda")
    for given in ({}, {"key_mask": inputs.key_masks(s.length)["mixed"]}):
        try:
            want = s.call(mixer, x, **given)
        except MixerError:  # it takes no mask
            continue
        try:
            got = s.call(there, x.cuda(), **{name: mask.cuda() for name, mask in given.items()}).cpu()
        except Exception as why:
            return ["crashed", f"moved: {type(why).__name__}: {why}"[:500]]
        error = float((got - want).detach().abs().max() / want.detach().abs().max())
        if not error < MOVED:
            return ["broken", f"moved: {error:.2g} from the CPU's output with {list(given)}"]
    return ["kept"]


def check_row(job: tuple[str, bool, float]) -> dict[str, Any]:
    """Check every promise of one row; each result is a status and, where the promise is not kept, the reason."""
    case, causal, until = job
    if time.time() > until:
        return {"case": case, "causal": causal, "not reached": True}
    sys.path.insert(0, str(HERE.parent / "tests"))
    import torch

    from cases import CASES, GRIDS
    from tokenmix.testing import PROMISES, run_promise, subject
    from tokenmix.testing.device import on_device

    torch.set_num_threads(1)
    name, options = CASES[case]
    grid, prefix = GRIDS.get(case, (None, 0))
    began = time.perf_counter()
    s = subject(name, {**options, "causal": causal}, dim=8, grid=grid, prefix=prefix)
    found = {"moved": moved(s)}
    with on_device("cuda"):
        for promise, check in PROMISES.items():
            if promise not in SKIPPED:
                result = run_promise(s, promise, check)
                bad = result.status not in ("kept", "waived", "not applicable")
                found[promise] = [result.status, result.text(verbose=True)[:3000]] if bad else [result.status]
    return {"case": case, "causal": causal, "seconds": round(time.perf_counter() - began, 1), "promises": found}


def main(argv: list[str] | None = None) -> int:
    """Check all rows and write the results; exit with 1 if a promise is broken, 2 without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3600, help="time after which no further row is begun")
    parser.add_argument("--only", nargs="+", default=[], help="names of rows")
    parser.add_argument("--skip", nargs="+", default=[], help="names of rows to leave out")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>_contract.json")
    args = parser.parse_args(argv)
    sys.path.insert(0, str(HERE.parent / "tests"))
    import torch

    from cases import forms

    if not torch.cuda.is_available():
        print("benchmarks/gpu_contract.py: there is no CUDA device here.", file=sys.stderr)
        return 2
    until = time.time() + args.seconds
    rows = sorted(forms(), key=lambda row: not row[0].startswith(FIRST))
    jobs = [(case, causal, until) for case, causal in rows if case not in args.skip and case in (args.only or [case])]
    machine = torch.cuda.get_device_name()
    out = args.out or HERE / "results" / f"{re.sub(r'[^a-z0-9]+', '_', machine.lower())}_contract.json"
    results: list[dict[str, Any]] = []
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for row in pool.imap_unordered(check_row, jobs, chunksize=1):
            results.append(row)
            report = {"machine": machine, "torch": torch.__version__, **summary(results)}
            out.write_text(json.dumps(report, indent=1) + "\n")  # after each row, so that a stopped run is kept
            for promise, (status, *why) in row.get("promises", {}).items():
                if why:
                    print(f"{row['case']} causal={row['causal']} {promise} {status}: {why[0][:400]}", flush=True)
    counts, missed = report["counts"], report["not reached"]
    print(f"{dict(counts)}, {len(missed)} rows not reached; {out}")
    return int(any(counts[bad] for bad in ("broken", "crashed")))


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the results by status, and list the rows."""
    counts = Counter(status for row in results for status, *_ in row.get("promises", {}).values())
    missed = [f"{row['case']} causal={row['causal']}" for row in results if "not reached" in row]
    return {"counts": counts, "not reached": missed, "rows": results}


if __name__ == "__main__":
    sys.exit(main())
