"""Spend fourteen minutes on a CUDA machine, in two calls of at most seven, each complete in itself.

    python benchmarks/gpu_minutes.py 1  # compile, profile each kernel, replay CUDA graphs, compare with float64
    python benchmarks/gpu_minutes.py 2  # time all forms beside torch's attention; train, compiled too, and twice
    python benchmarks/gpu_minutes.py 1 2 --rehearse  # both without a GPU, in Triton's interpreter on small sizes,
                                                     # checks of all forms and the rest of two

Besides the checkout they need torch with CUDA, its triton, a C compiler (for ``torch.compile``) and, for one row that
is recorded as failed otherwise, fla; no network, no data: the text that is trained on is that of docs/. Kernels are
compiled by all processors at once before anything is timed. Everything is written after each row to
benchmarks/results/<machine>_minutes.json, or to ``--out``; what ``--seconds`` leave no time for is named there.

Times are medians over runs with a cold L2 (triton's do_bench). "share" is the fraction of a measured limit: of copy
bandwidth for scans, counting the tensors named in BYTES; of the bf16 matrix rate for AFT-full, counting the products of
the causal half. A form without a kernel is recorded as such, and so is a peer that is not installed or fails.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported; processes started later inherit it

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix import functional
from tokenmix.errors import MixerError
from tokenmix.kernels.triton import INTERPRETED
from tokenmix.models import LM, LMConfig

HERE = Path(__file__).parent
DEVICE = "cpu" if INTERPRETED else "cuda"
WINDOW = 128
FULL_AT_MOST = 16384  # beyond, w itself fills the memory
Form = tuple[Callable[..., Tensor], tuple[Tensor, ...]]
Rows = Iterator[dict[str, Any]]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MIXERS = ({"name": "aft_local", "window": 16}, {"name": "linear", "heads": 4}, {"name": "aft_simple"})  # trained


class Sizes(NamedTuple):
    """Hold what a run takes: lengths, tokens of a batch, features, heads, shapes of the checks, size of training."""

    lengths: tuple[int, ...] = (1024, 4096)
    tokens: int = 65536
    dim: int = 2048
    heads: int = 16
    checks: tuple[tuple[int, int, int, int], ...] = ((1, 1, 8, 2), (2, 333, 96, 4), (3, 1024, 256, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    keys: tuple[str, ...] = ("normal", "spike", "ramp")
    probe: int = 2**29  # numbers copied to measure the bandwidth
    square: int = 8192  # rows of the matrices multiplied to measure their rate
    processes: int = 12
    calls: int = 3  # of which the profile is the mean
    steps: int = 60
    batch: int = 16
    width: int = 384
    layers: int = 6
    forms: tuple[str, ...] = ()  # that are compiled, profiled, captured and timed; () for all


REHEARSED = Sizes(
    (9,), 9, 8, 2, ((1, 9, 4, 2),), (torch.bfloat16,), ("spike",), 2**10, 16, 1, 1, steps=1, batch=1, width=8, layers=3,
    forms=("hydra causal", "aft_full causal"),
)  # fmt: skip
BYTES = {"forward": 6, "both": 15}  # tensors of (B, T, D) that a three-launch scan must move
DECAYED = {"forward": 8, "both": 22}  # the same with log-decays


def forms(T: int, D: int, heads: int, dtype: torch.dtype) -> dict[str, Form]:
    """Return each form as a function of q, k, v and of the parameters after it."""
    w = partial(torch.randn, dtype=dtype, device=DEVICE)
    found: dict[str, Form] = {}
    for causal in (True, False):
        mark = " causal" if causal else ""
        found[f"aft_simple{mark}"] = partial(functional.aft_simple, causal=causal), ()
        found[f"hydra{mark}"] = partial(functional.hydra, causal=causal), ()
        found[f"linear_attention{mark}"] = partial(functional.linear_attention, heads=heads, causal=causal), ()
        found[f"aft_local{mark}"] = partial(_local, causal=causal), (w(T, 16), w(T, 16))
        if causal:
            found["aft_forget causal"] = _forget, (-w(T, D).abs(),)
        found[f"aft_conv{mark}"] = partial(_conv, heads=heads, causal=causal), (w(heads, WINDOW + 1),)
        if T <= FULL_AT_MOST:
            found[f"aft_full{mark}"] = partial(functional.aft_full, causal=causal), (w(T, T),)
    return found


def _forget(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> Tensor:
    return functional.aft_forget(q, k, v, g.expand(len(q), -1, -1), causal=True, **options)


def _local(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
    return functional.aft_local(q, k, v, (a, b), window=min(WINDOW, k.shape[1]), **options)


def _conv(q: Tensor, k: Tensor, v: Tensor, kernel: Tensor, *, heads: int, **options: Any) -> Tensor:
    return functional.aft_conv(q, k.unflatten(-1, (heads, -1))[..., 0].contiguous(), v, kernel, **options)


def check_form(job: tuple[str, torch.dtype, tuple[int, int, int, int], tuple[str, ...]]) -> list[dict[str, Any]]:
    """Compare one form with the float64 eager form at one size, for each kind of keys."""
    name, dtype, (B, T, D, heads), kinds = job
    torch.manual_seed(0)
    form, parameters = forms(T, D, heads, dtype)[name]
    what = {"form": name, "dtype": _name(dtype), "shape": [B, T, D]}
    return [what | {"keys": keys} | _check(form, parameters, B, T, D, dtype, keys) for keys in kinds]


def checks(sizes: Sizes, until: float) -> Rows:
    """Compare each kernel with the float64 eager form, all processors at once.

    Yields the largest relative error of output and gradients.
    """
    names = list(forms(1, 8, 2, torch.float32))
    jobs = [(name, dtype, shape, sizes.keys) for dtype in sizes.dtypes for shape in sizes.checks for name in names]
    for rows in _spread(check_form, jobs, sizes.processes, until):
        yield from rows


def _spread(run: Callable[[Any], Any], jobs: list[Any], processes: int, until: float) -> Iterator[Any]:
    """Yield the results of jobs in processes of their own until a time; then what was not reached."""
    done = 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        results = pool.imap_unordered(run, jobs, chunksize=1)
        try:
            for done in range(1, len(jobs) + 1):  # noqa: B007  (read after a time-out)
                yield results.next(timeout=max(0.01, until - time.monotonic()))
        except multiprocessing.TimeoutError:
            yield [{"not reached": len(jobs) - done + 1}]


def compile_form(job: tuple[str, int, Sizes]) -> list[dict[str, Any]]:
    """Run a form once at the size that is timed, so that its kernels are in Triton's cache."""
    name, T, sizes = job
    began = time.perf_counter()
    run, leaves = timed_form(name, T, sizes)
    torch.autograd.grad(run(*leaves).sum(), leaves)
    return [{"form": name, "T": T, "seconds": round(time.perf_counter() - began, 1)}]


def timed_form(name: str, T: int, sizes: Sizes) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a form on the kernels, and its arguments at the size that is timed."""
    form, parameters = forms(T, sizes.dim, sizes.heads, torch.bfloat16)[name]
    B = max(1, sizes.tokens // T)
    leaves = [torch.randn(B, T, sizes.dim, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
    return partial(form, backend="triton"), [a.requires_grad_() for a in (*leaves, *parameters)]


def timed_names(T: int, sizes: Sizes) -> list[str]:
    """Return the forms that are timed: the causal ones."""
    names = [name for name in forms(T, sizes.dim, sizes.heads, torch.bfloat16) if "causal" in name]
    return [name for name in names if name in (sizes.forms or names)]


def compilation(sizes: Sizes, until: float) -> Rows:
    """Compile the kernels that are timed, all processors at once."""
    jobs = [(name, T, sizes) for T in sizes.lengths for name in timed_names(T, sizes)]
    for rows in _spread(compile_form, jobs, sizes.processes, until):
        yield from rows


def profile(sizes: Sizes, until: float) -> Rows:
    """Yield microseconds of each kernel of each form, forward and backward, mean of several calls."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    T, calls = sizes.lengths[0], sizes.calls
    for name in timed_names(T, sizes):
        if time.monotonic() > until:
            yield {"form": name, "not reached": True}
            continue
        run, leaves = timed_form(name, T, sizes)
        torch.autograd.grad(run(*leaves).sum(), leaves)
        _wait()
        with profiler(activities=[ProfilerActivity.CPU if DEVICE == "cpu" else ProfilerActivity.CUDA]) as seen:
            for _ in range(calls):
                torch.autograd.grad(run(*leaves).sum(), leaves)
            _wait()
        kernels = {
            e.key: [
                round((e.self_cpu_time_total if DEVICE == "cpu" else e.self_device_time_total) / calls, 1),
                e.count / calls,
            ]
            for e in seen.key_averages()
        }
        yield {"form": name, "T": T, "us and launches": dict(sorted(kernels.items(), key=lambda one: -one[1][0]))}


def graphs(sizes: Sizes, until: float) -> Rows:
    """Capture forward and backward of each form as a CUDA graph, and compare its replay on other inputs to the bit."""
    B, T, D, heads = sizes.checks[-1]
    for name, (form, parameters) in forms(T, D, heads, torch.bfloat16).items():
        if name not in (sizes.forms or (name,)):
            continue
        if time.monotonic() > until:
            yield {"form": name, "not reached": True}
            continue
        leaves = [torch.randn(B, T, D, dtype=torch.bfloat16, device=DEVICE) for _ in range(3)]
        leaves = [a.requires_grad_() for a in (*leaves, *parameters)]

        def run(form: Callable[..., Tensor] = form, leaves: list[Tensor] = leaves) -> list[Tensor]:
            y = form(*leaves, backend="triton")
            return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

        try:
            replay, found = _capture(run)
        except Exception as why:  # what cannot be captured is a result too
            yield {"form": name, "failed": _reason(why)}
            continue
        with torch.no_grad():
            for a in leaves[:3]:
                a.copy_(torch.randn_like(a))
        replay()
        yield {"form": name, "equal": all(torch.equal(a, b) for a, b in zip(found, run(), strict=True))}


def _capture(run: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
    """Return what replays a call, and the tensors it writes; in a rehearsal the call is simply repeated."""
    if DEVICE == "cpu":
        found = run()

        def again() -> None:
            for a, b in zip(found, run(), strict=True):
                a.detach().copy_(b)

        return again, found
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph.replay, found


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def _reason(why: Exception) -> str:
    return f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"[:200]


def _keys(kind: str, k: Tensor) -> Tensor:
    if kind == "spike":
        return torch.where(
            torch.arange(k.shape[1], device=k.device)[:, None] == int(0.9 * k.shape[1]), torch.full_like(k, 100.0), k
        )
    return (
        torch.linspace(-100, 100, k.shape[1], device=k.device, dtype=k.dtype)[:, None].expand_as(k).contiguous()
        if kind == "ramp"
        else k
    )


def _check(
    form: Callable[..., Tensor], parameters: tuple[Tensor, ...], B: int, T: int, D: int, dtype: torch.dtype, keys: str
) -> dict[str, Any]:
    q, k, v, g = (torch.randn(B, T, D, device=DEVICE, dtype=dtype) for _ in range(4))
    results = []
    try:
        for backend, kind in (("triton", dtype), ("eager", torch.float64)):
            leaves = [a.detach().to(kind).requires_grad_() for a in (q, _keys(keys, k), v, *parameters)]
            y = form(*leaves, backend=backend)
            results.append([y, *torch.autograd.grad(y, leaves, g.to(kind))])
    except MixerError as why:
        return {"no kernel": str(why)}
    # keys of which one has all the weight have a gradient of 0, so gradients are relative to the largest of them
    sizes = [float(b.abs().max()) for b in results[1]]
    scales = [sizes[0], *[max(sizes[1:])] * (len(sizes) - 1)]
    errors = [float((a.double() - b).abs().max()) / s for a, b, s in zip(*results, scales, strict=True)]
    return {"errors": errors, "kept": all(e <= TOLERANCE[dtype] for e in errors)}


def peers(T: int, D: int, heads: int) -> dict[str, Callable[..., Tensor]]:
    """Return the peers as functions of q, k, v (B, h, T, D / h)."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def sdpa(kind: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    kinds = [SDPBackend.MATH] if DEVICE == "cpu" else [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    found: dict[str, Callable[..., Tensor]] = {f"sdpa {kind.name.lower()}": partial(sdpa, kind) for kind in kinds}
    found["flex sliding window"] = partial(_flex, T)
    found["fla linear attention"] = _fla
    return found


def _flex(T: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _flex_compiled()(q, k, v, block_mask=_window_mask(T))


_made: dict[Any, Any] = {}


def _flex_compiled() -> Any:
    if "flex" not in _made:
        from torch.nn.attention.flex_attention import flex_attention

        _made["flex"] = flex_attention if DEVICE == "cpu" else torch.compile(flex_attention)
    return _made["flex"]


def _window_mask(T: int) -> Any:
    if T not in _made:
        from torch.nn.attention.flex_attention import create_block_mask

        _made[T] = create_block_mask(lambda b, h, t, s: (s <= t) & (t - s < WINDOW), None, None, T, T, device=DEVICE)
    return _made[T]


def _fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(
        *((F.elu(a) + 1 if i < 2 else a).transpose(1, 2).contiguous() for i, a in enumerate((q, k, v)))
    )[0]


def limits(sizes: Sizes) -> dict[str, float]:
    """Measure copy bandwidth in bytes/s (read and write counted) and the bf16 matrix rate in FLOP/s."""
    a, b = (torch.empty(sizes.probe, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    x = torch.randn(sizes.square, sizes.square, dtype=torch.bfloat16, device=DEVICE)
    copy, product = _clock(lambda: b.copy_(a)), _clock(lambda: x @ x)
    return {"copy": 2 * a.nbytes / copy * 1e3, "matrix": 2 * sizes.square**3 / product * 1e3}


def _clock(run: Callable[[], object]) -> float:
    """Return the median milliseconds of a call; of one call in a rehearsal."""
    if DEVICE == "cpu":
        began = time.perf_counter()
        run()
        return (time.perf_counter() - began) * 1e3
    from triton.testing import do_bench

    return float(do_bench(run, return_mode="median"))


def time_passes(run: Callable[..., Tensor], leaves: list[Tensor]) -> dict[str, Any]:
    """Return median milliseconds of forward and of forward and backward; if either fails, what went wrong."""
    try:
        with torch.no_grad():
            forward = _clock(lambda: run(*leaves))
        g = torch.randn_like(run(*leaves))
        both = _clock(lambda: torch.autograd.grad(run(*leaves), leaves, g))
    except Exception as why:  # what does not run on this machine is a result too
        return {"failed": _reason(why)}
    return {"forward": forward, "both": both}


def times(sizes: Sizes, until: float) -> Rows:
    """Measure one row for each form and peer at each length, in bf16, the peers of a length first."""
    limit = limits(sizes)
    yield {"limits": limit}
    for T in sizes.lengths:
        B, heads, D = max(1, sizes.tokens // T), sizes.heads, sizes.dim
        best: dict[str, float | None] = dict.fromkeys(BYTES)
        runs = [(name, partial(_timed_peer, run, B, T, D, heads)) for name, run in peers(T, D, heads).items()]
        runs += [(name, partial(_timed_kernel, name, T, sizes)) for name in timed_names(T, sizes)]
        for name, measure in runs:
            if time.monotonic() > until:
                yield {"T": T, "form": name, "not reached": True}
                continue
            row = measure()
            if name.startswith("sdpa"):
                best = {way: min(filter(None, (best[way], row.get(way))), default=None) for way in BYTES}
            yield {"T": T, "B": B, "form": name} | row | _shares(name, row, B, T, D, limit, best)


def _timed_peer(run: Callable[..., Tensor], B: int, T: int, D: int, heads: int) -> dict[str, Any]:
    like = partial(torch.randn, B, heads, T, D // heads, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    return time_passes(run, [like() for _ in range(3)])


def _timed_kernel(name: str, T: int, sizes: Sizes) -> dict[str, Any]:
    return time_passes(*timed_form(name, T, sizes))


def _shares(
    name: str, row: dict[str, Any], B: int, T: int, D: int, limit: dict[str, float], best: dict[str, Any]
) -> dict[str, Any]:
    """Return the fraction of the measured limit that was reached, and the ratio to the best SDPA backend, causal."""
    found: dict[str, Any] = {}
    for way in BYTES.keys() & row.keys() if "causal" in name else ():
        if name.startswith("aft_full"):
            work, unit = (4 if way == "forward" else 12) * B * T * T * D / (2 if "causal" in name else 1), "matrix"
        else:
            moved = DECAYED if name.startswith("aft_forget") else BYTES
            work, unit = moved[way] * B * T * D * 2, "copy"
        found[f"{way} share of {unit}"] = work / (row[way] * 1e-3) / limit[unit]
        found[f"{way} x SDPA causal"] = best[way] and best[way] / row[way]
    return found


def training(sizes: Sizes, until: float) -> Rows:
    """Train a byte model on the documentation: twice, whose weights must be equal to the bit, and once compiled."""
    digests = []
    for compiled in (False, False, True):
        if time.monotonic() > until:
            yield {"compiled": compiled, "not reached": True}
            continue
        row, digest = _train_once(sizes, compiled)
        digests += [] if compiled else [digest]
        yield row | ({"equal to the bit": digests[0] == digests[1]} if len(digests) == 2 and not compiled else {})


def _train_once(sizes: Sizes, compiled: bool) -> tuple[dict[str, Any], str]:
    """Train from one seed; return milliseconds of a step, the losses, and a digest of the weights."""
    torch.manual_seed(0)
    T = sizes.lengths[0]
    config = LMConfig(dim=sizes.width, max_len=T, mixers=MIXERS, layers=sizes.layers)
    model = LM(config).to(DEVICE, torch.bfloat16)
    step = torch.compile(model, backend="eager" if DEVICE == "cpu" else "inductor") if compiled else model
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = b"".join(path.read_bytes() for path in sorted((HERE.parent / "docs").glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(DEVICE)
    draw = torch.Generator().manual_seed(1)
    losses, began, warm = [], 0.0, sizes.steps // 3
    for i in range(sizes.steps):
        if i == warm:
            _wait()
            began = time.perf_counter()
        at = torch.randint(len(data) - T - 1, (sizes.batch,), generator=draw)
        batch = torch.stack([data[a : a + T + 1] for a in at.tolist()])
        loss = F.cross_entropy(step(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    _wait()
    ms = (time.perf_counter() - began) / (sizes.steps - warm) * 1e3
    digest = hashlib.sha256()
    for p in model.parameters():
        digest.update(p.detach().float().cpu().numpy().tobytes())
    row = {"compiled": compiled, "ms of a step": ms, "first loss": float(losses[0]), "last loss": float(losses[-1])}
    return row, digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


CALLS: dict[int, list[tuple[Callable[[Sizes, float], Rows], float]]] = {
    1: [(compilation, 120), (profile, 180), (graphs, 240), (checks, 400)],
    2: [(compilation, 120), (times, 270), (training, 400)],
}
"""Call -> its parts, each with the second of the call at which it begins nothing more."""


def wrong(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a report that break a promise."""
    rows = [row for part in report.values() if isinstance(part, list) for row in part]
    return [row for row in rows if False in (row.get("kept"), row.get("equal"), row.get("equal to the bit"))]


def main(argv: list[str] | None = None) -> int:
    """Run the calls and write the results; exit with 1 if a promise is broken, 2 without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("calls", type=int, nargs="+", choices=list(CALLS))
    parser.add_argument("--rehearse", action="store_true", help="run on small sizes in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=400, help="of a call; its parts end in proportion")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>_minutes.json")
    args = parser.parse_args(argv)
    if not args.rehearse and not torch.cuda.is_available():
        print("benchmarks/gpu_minutes.py: there is no CUDA device here; --rehearse needs none.", file=sys.stderr)
        return 2
    import triton

    sizes = REHEARSED if args.rehearse else Sizes()
    machine = "rehearsal" if args.rehearse else torch.cuda.get_device_name()
    out = args.out or HERE / "results" / f"{re.sub(r'[^a-z0-9]+', '_', machine.lower())}_minutes.json"
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}  # of the other call
    report |= {"machine": machine, "torch": torch.__version__, "triton": triton.__version__, "sizes": repr(sizes)}
    for call in args.calls:
        began = time.monotonic()
        for part, end in CALLS[call]:
            rows: list[dict[str, Any]] = []
            report[part.__name__] = rows
            for row in part(sizes, began + end * args.seconds / 400):
                rows.append(row)
                print(part.__name__, json.dumps(row), flush=True)
                out.write_text(json.dumps(report, indent=1) + "\n")
    broken = wrong(report)
    print(f"{len(broken)} rows break a promise; {out}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
