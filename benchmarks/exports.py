"""Export every mixer as an ONNX file, for whole sequences and for the decode step, and check it against torch.

ONNX Runtime runs each file beside torch at sizes other than those traced.

    python benchmarks/exports.py [--rows attention hydra ...] [--again]

The mixers are small, and causal where they can be. The results are written to benchmarks/results/exports.json after
each mixer, and docs/hosts/onnx.md shows them; existing entries are not made again, unless with --again. torch takes
from a second to minutes to trace one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tokenmix import MIXERS, MixerError, build_mixer
from tokenmix.export import export_onnx
from tokenmix.lab.bench.roofline import machine
from tokenmix.mixers import mixer_options, required_options
from tokenmix.testing.subject import perturb
from whole_models import RESULTS

DIM = 16
NEEDED = {"max_len": 24, "window": 4, "kernel_size": 5}


def built(name: str) -> Any:
    """Build a mixer whose weights all affect the output."""
    known = mixer_options(MIXERS[name])
    torch.manual_seed(0)
    heads = {"heads": 2} if "heads" in known else {}
    options: dict[str, Any] = {option: NEEDED[option] for option in required_options(MIXERS[name], heads)}
    return perturb(build_mixer(name, DIM, **heads, **options, causal=MIXERS[name].facts.causal), seed=1).eval()


def exported(mixer: Any, path: Path, decode: bool) -> dict[str, Any]:
    """Return the outcome of exporting one file."""
    began = time.perf_counter()
    try:
        report = export_onnx(mixer, path, decode=decode, key_mask=not decode, length=None if mixer.max_len else 24)
    except MixerError as why:
        return {"refused": str(why)}
    sizes = {"batch": report.sizes.batch, "length": list(report.sizes.length), "padded": report.sizes.padded}
    return {
        **sizes,
        "difference": report.difference,
        "nodes": report.nodes,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(MIXERS), default=list(MIXERS))
    parser.add_argument("--again", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "exports.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "mixers": {}}
    for name in given.rows:
        if name not in found["mixers"] or given.again:
            mixer = built(name)
            with tempfile.TemporaryDirectory() as folder:
                whole, step = (
                    exported(mixer, Path(folder) / "whole.onnx", False),
                    exported(mixer, Path(folder) / "step.onnx", True),
                )
            found["mixers"][name] = {"causal": mixer.causal, "whole": whole, "decode": step}
            path.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{name:32} whole {found['mixers'][name]['whole']}\n{'':32} step  {found['mixers'][name]['decode']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
