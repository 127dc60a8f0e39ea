"""Time gated linear recurrences against the functions that other libraries run on a CPU.

    python -m benchmarks.recurrence              # print the table
    python -m benchmarks.recurrence --record     # and keep it in results/recurrence.json
    python -m benchmarks.recurrence --peaks      # add the peaks of memory to what is kept

Ours, ONNX Runtime's contributed operator (com.microsoft LinearAttention) and transformers' functions take turns in one
process, after their outputs, and gradients where they have them, were found equal. Times are the least CPU-seconds of
a call, per token and head in microseconds. The limit is a matrix product of 1,024 x 1,024 in the same process; the work
is 3 dk dv multiply-adds for a token and head (2 without a delta rule: read, write), and three times as many with a
backward pass. Peaks are resident bytes above the inputs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmix.functional import recurrence
from tokenmix.lab.bench.roofline import machine
from tokenmix.system.machine import process_memory, reset_peak
from tokenmix.system.torchvision import ensure_torchvision

RECORD = Path(__file__).parent / "results" / "recurrence.json"
HEADS, WIDTH, LENGTH, SHORT, CONTEXT = 16, 128, 1024, 128, 64
EQUAL = 2e-4  # of outputs and gradients, relative to the largest: their sums are float32 in another order
Call = Callable[..., Tensor]


def inputs(rule: str, T: int) -> dict[str, Tensor]:
    """Draw unit keys and queries, decays as of trained layers; "fast": of heads that forget a token within the next."""
    draw = torch.Generator().manual_seed(0)
    heads, dk, dv = (24, 128, 64) if rule == "mamba2" else (HEADS, WIDTH, WIDTH)
    shared = 1 if rule == "mamba2" else heads
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, shared, dk, generator=draw), dim=-1) for _ in range(2))
    shape = (1, T, heads, dk) if rule == "kda" else (1, T, heads)
    given = {"q": q, "k": k, "v": torch.randn(1, T, heads, dv, generator=draw)}
    given["decay"] = (-40 if rule == "fast" else -0.1) * torch.rand(shape, generator=draw)
    given["beta"] = torch.rand(1, T, heads, generator=draw)
    return given


def ours(rule: str) -> Call:
    if rule == "mamba2":  # the step dt stands in beta: values are scaled by it, and with A = -1 the decay is -dt
        return lambda q, k, v, decay, beta: recurrence(
            q, k, v * beta[..., None], decay=-beta, rule="gated", scale=1.0, backend="cpu"
        )[0]
    return lambda q, k, v, decay, beta: recurrence(q, k, v, decay=decay, beta=beta, backend="cpu")[0]


def transformers_of(rule: str) -> Call:
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    if rule == "mamba2":
        return lambda q, k, v, decay, beta: mamba2_chunk_scan(v, beta, -torch.ones(v.shape[2]), k, q, 256)
    form = torch_chunk_gated_delta_rule if rule in ("gdn", "fast") else chunk_kimi_delta_attention
    return lambda q, k, v, decay, beta: form(q, k, v, decay, beta)[0]


def onnx_runtime_of(rule: str, given: dict[str, Tensor]) -> Call:
    """Return ONNX Runtime's contributed operator on one thread; its tensors are handed over without a copy."""
    import onnxruntime as ort
    from onnx import TensorProto, helper

    T, dk, dv = given["q"].shape[1], given["q"].shape[3], given["v"].shape[3]
    names = ("query", "key", "value", "past", "decay", "beta")
    node = helper.make_node(
        "LinearAttention",
        [*names],
        ["out", "state"],
        domain="com.microsoft",
        update_rule="gated_delta",
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        scale=dk**-0.5,
    )
    wide = HEADS * dk if rule == "kda" else HEADS
    sizes = {"query": HEADS * dk, "key": HEADS * dk, "value": HEADS * dv, "decay": wide, "beta": HEADS}
    infos = [
        helper.make_tensor_value_info(
            name, TensorProto.FLOAT, [1, HEADS, dk, dv] if name == "past" else [1, T, sizes[name]]
        )
        for name in names
    ]
    out = [
        helper.make_tensor_value_info("out", TensorProto.FLOAT, None),
        helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
    ]
    model = helper.make_model(
        helper.make_graph([node], "one", infos, out),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    past = torch.zeros(1, HEADS, dk, dv).numpy()

    def run(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        feed = {
            name: a.flatten(2).numpy()
            for name, a in zip(("query", "key", "value", "decay"), (q, k, v, decay), strict=True)
        }
        y = session.run(["out"], feed | {"past": past, "beta": beta.numpy()})[0]
        return torch.from_numpy(y).view(v.shape)

    return run


def with_backward(form: Call, given: dict[str, Tensor]) -> Callable[[], list[Tensor]]:
    """Return a call of forward and backward that gives output and gradients."""
    leaves = {name: a.clone().requires_grad_() for name, a in given.items()}
    g = torch.randn(given["v"].shape, generator=torch.Generator().manual_seed(1))

    def run() -> list[Tensor]:
        y = form(**leaves)
        found = torch.autograd.grad(y, list(leaves.values()), g, allow_unused=True)
        return [y.detach(), *(torch.zeros(()) if a is None else a for a in found)]

    return run


def forward_only(form: Call, given: dict[str, Tensor]) -> Callable[[], list[Tensor]]:
    def run() -> list[Tensor]:
        with torch.no_grad():
            return [form(**given)]

    return run


def decode_pair(given: dict[str, Tensor]) -> dict[str, Callable[[], list[Tensor]]]:
    """Return one token after a state, without projections: ours and transformers' recurrent function."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    before, after = ({name: a[:, part] for name, a in given.items()} for part in (slice(0, -1), slice(-1, None)))
    with torch.no_grad():
        _, state = recurrence(**before)

    def own() -> list[Tensor]:
        with torch.no_grad():
            return list(recurrence(**after, past=state))

    def theirs() -> list[Tensor]:
        with torch.no_grad():
            q, k, v, g, b = after.values()
            return list(torch_recurrent_gated_delta_rule(q, k, v, g, b, state, True))

    return {"tokenmix": own, "transformers": theirs}


def subjects(rule: str, what: str, T: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Return what is compared, by name."""
    given = inputs(rule, T)
    if what == "step":
        return decode_pair(given)
    wrap = forward_only if what == "forward" else with_backward
    found = {"tokenmix": wrap(ours(rule), given), "transformers": wrap(transformers_of(rule), given)}
    if what == "forward" and rule != "mamba2":
        found["onnxruntime"] = forward_only(onnx_runtime_of(rule, given), given)
    return found


def check_equal(found: dict[str, Callable[[], list[Tensor]]], *, first: bool) -> float:
    """Return the largest relative difference of others from ours; raise SystemExit where it is too large."""
    want, worst = found["tokenmix"](), 0.0
    for name, run in found.items():
        for ours_one, theirs in zip(want, run(), strict=True):
            off = float((ours_one - theirs).abs().max() / ours_one.abs().max().clamp_min(1e-30))
            worst = max(worst, off)
            if off > EQUAL:
                raise SystemExit(f"{name} differs from ours by {off:.1e}, so no time is taken.")
            if first:
                break
    return worst


def limit() -> Callable[[], list[Tensor]]:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return lambda: [a @ b]


def take_turns(found: dict[str, Callable[[], list[Tensor]]], seconds: float) -> dict[str, dict[str, float]]:
    """Return the least CPU-seconds and wall seconds of each, in turns; short calls are repeated."""
    least = {name: {"cpu": float("inf"), "wall": float("inf")} for name in found}
    times = {}
    for name, run in found.items():
        start = time.perf_counter()
        run()
        times[name] = max(1, int(0.02 / max(time.perf_counter() - start, 1e-6)))
    end, turns = time.perf_counter() + seconds, 0
    while turns < 3 or time.perf_counter() < end:
        for name, run in found.items():
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(times[name]):
                run()
            least[name]["cpu"] = min(least[name]["cpu"], (time.process_time() - cpu) / times[name])
            least[name]["wall"] = min(least[name]["wall"], (time.perf_counter() - wall) / times[name])
        turns += 1
    return least


CASES = {
    "gdn forward": ("gdn", "forward", LENGTH),
    "gdn forward, fast decay": ("fast", "forward", LENGTH),
    "gdn forward and backward": ("gdn", "backward", LENGTH),
    "kda forward": ("kda", "forward", LENGTH),
    "kda forward and backward": ("kda", "backward", SHORT),
    "mamba2 forward": ("mamba2", "forward", LENGTH),
    "mamba2 forward and backward": ("mamba2", "backward", LENGTH),
    "gdn one token": ("gdn", "step", CONTEXT),
}


def peak(case: str, name: str) -> float:
    """Return the MiB above the inputs at the peak of one call, in a process of its own."""
    code = f"from benchmarks.recurrence import print_peak; print_peak({case!r}, {name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def print_peak(case: str, name: str) -> None:
    ensure_torchvision()
    torch.set_num_threads(1)
    rule, what, T = CASES[case]
    subjects(rule, what, 64)[name]()  # what is loaded and compiled once
    run = subjects(rule, what, T)[name]
    before = process_memory("VmRSS")
    reset_peak(torch.device("cpu"))
    run()
    after = process_memory("VmHWM")
    print(0.0 if before is None or after is None else (after - before) / 2**20)


def measure(case: str, seconds: float) -> dict[str, Any]:
    rule, what, T = CASES[case]
    found = subjects(rule, what, T)
    off = check_equal(found, first=False)
    least = take_turns({**found, "limit": limit()}, seconds)
    heads, dk, dv = (24, 128, 64) if rule == "mamba2" else (HEADS, WIDTH, WIDTH)
    tokens = 1 if what == "step" else T
    rate = 1024**3 / least.pop("limit")["cpu"]
    work = (2 if rule == "mamba2" else 3) * dk * dv * (3 if what == "backward" else 1)
    row: dict[str, Any] = {"case": case, "tokens": T, "difference": off, "multiply_adds_per_s": rate, "least": {}}
    for name, each in least.items():
        us = each["cpu"] / tokens / heads * 1e6
        row["least"][name] = {
            "us": round(us, 3),
            "wall_us": round(each["wall"] / tokens / heads * 1e6, 3),
            "share": round(work / rate * 1e6 / us, 3),
        }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=6.0, help="for each case")
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--peaks", action="store_true")
    given = parser.parse_args()
    ensure_torchvision()
    if given.peaks:
        kept = json.loads(RECORD.read_text())
        for row in kept["rows"]:
            if row["case"] not in given.cases or CASES[row["case"]][1] == "step":  # 1 MiB is below what this resolves
                continue
            for name, each in row["least"].items():
                each["peak_mib"] = round(peak(row["case"], name), 1)
                print(row["case"], name, each["peak_mib"], "MiB", flush=True)
        RECORD.write_text(json.dumps(kept, indent=1) + "\n")
        return
    torch.set_num_threads(1)
    rows = []
    print("| case | function | us per token and head | times ours | share of the limit |")
    print("|---|---|---|---|---|")
    for case in given.cases:
        row = measure(case, given.seconds)
        rows.append(row)
        own = row["least"]["tokenmix"]["us"]
        for name, each in row["least"].items():
            cells = (case, name, each["us"], f"{each['us'] / own:.2f}", f"{each['share']:.0%}")
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    if given.record:
        peaks = {row["case"]: row["least"] for row in json.loads(RECORD.read_text())["rows"]} if RECORD.exists() else {}
        for row in rows:
            for name, each in row["least"].items():  # memory is measured apart
                each |= {k: v for k, v in peaks.get(row["case"], {}).get(name, {}).items() if k == "peak_mib"}
        RECORD.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
