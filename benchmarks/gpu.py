"""Check the Triton kernels on a CUDA machine, then time them beside torch's attention.

The checks compare every kernel, forward and backward, with the float64 eager form.

    python benchmarks/gpu.py  # checks, then times at 1k to 64k tokens; writes benchmarks/results/<machine>.json
    python benchmarks/gpu.py --check-only
    python benchmarks/gpu.py --lengths 1024 4096 --dim 1024 --heads 8

Each length holds ``--tokens`` tokens in all. Times are medians over runs with a cold L2 (triton's do_bench). "share" is
the fraction of a measured limit: of copy bandwidth for scans, counting the tensors named in BYTES; of the bf16 matrix
rate for AFT-full, counting the products of the causal half. A form without a kernel is recorded as such, and so is a
peer that is not installed or fails.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenmix import functional
from tokenmix.errors import MixerError

HERE = Path(__file__).parent
LENGTHS = [1024, 4096, 16384, 65536]
WINDOW = 128
FULL_AT_MOST = 16384  # beyond, w itself fills the memory
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BYTES = {"forward": 6, "both": 15}  # tensors of (B, T, D) that a three-launch scan must move
DECAYED = {"forward": 8, "both": 22}  # the same with log-decays


def forms(
    T: int, D: int, heads: int, dtype: torch.dtype
) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Return each form as a function of q, k, v and of the parameters after it."""
    w = partial(torch.randn, dtype=dtype, device="cuda")
    found: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {}
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


def checks(dtypes: list[torch.dtype]) -> list[dict[str, Any]]:
    """Compare each kernel with the float64 eager form, at several sizes and keys.

    Returns the largest relative error of output and gradients.
    """
    found = []
    for dtype in dtypes:
        for B, T, D, heads in ((1, 1, 8, 2), (2, 333, 96, 4), (3, 1024, 256, 4)):
            for name, (form, parameters) in forms(T, D, heads, dtype).items():
                for keys in ("normal", "spike", "ramp"):
                    found.append(
                        {"form": name, "dtype": _name(dtype), "shape": [B, T, D], "keys": keys}
                        | _check(form, parameters, B, T, D, dtype, keys)
                    )
                    print(found[-1], flush=True)
    return found


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
    q, k, v, g = (torch.randn(B, T, D, device="cuda", dtype=dtype) for _ in range(4))
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

    kinds = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
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

        _made["flex"] = torch.compile(flex_attention)
    return _made["flex"]


def _window_mask(T: int) -> Any:
    if T not in _made:
        from torch.nn.attention.flex_attention import create_block_mask

        _made[T] = create_block_mask(lambda b, h, t, s: (s <= t) & (t - s < WINDOW), None, None, T, T, device="cuda")
    return _made[T]


def _fla(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from fla.ops.linear_attn import chunk_linear_attn

    return chunk_linear_attn(
        *((F.elu(a) + 1 if i < 2 else a).transpose(1, 2).contiguous() for i, a in enumerate((q, k, v)))
    )[0]


def limits() -> dict[str, float]:
    """Measure copy bandwidth in bytes/s (read and write counted) and the bf16 matrix rate in FLOP/s."""
    from triton.testing import do_bench

    a, b = (torch.empty(2**29, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    x = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    copy, product = (do_bench(run, return_mode="median") for run in (lambda: b.copy_(a), lambda: x @ x))
    return {"copy": 2 * a.nbytes / copy * 1e3, "matrix": 2 * 8192**3 / product * 1e3}


def timed(run: Callable[..., Tensor], leaves: list[Tensor]) -> dict[str, Any]:
    """Return median milliseconds of forward and of forward and backward; if either fails, what went wrong."""
    from triton.testing import do_bench

    try:
        with torch.no_grad():
            forward = do_bench(lambda: run(*leaves), return_mode="median")
        g = torch.randn_like(run(*leaves))
        both = do_bench(lambda: torch.autograd.grad(run(*leaves), leaves, g), return_mode="median")
    except Exception as why:  # what does not run on this machine is a result too
        return {"failed": f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"[:200]}
    return {"forward": forward, "both": both}


def times(
    lengths: list[int], tokens: int, D: int, heads: int, limit: dict[str, float], *, causal: bool
) -> list[dict[str, Any]]:
    """Measure one row for each form and peer at each length, in bf16."""
    found = []
    for T in lengths:
        B = max(1, tokens // T)
        for name, run in peers(T, D, heads).items():
            leaves = [
                torch.randn(B, heads, T, D // heads, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                for _ in range(3)
            ]
            found.append({"T": T, "B": B, "form": name} | timed(run, leaves))
            print(found[-1], flush=True)
        best = {
            way: min((r[way] for r in found if r["T"] == T and r["form"].startswith("sdpa") and way in r), default=None)
            for way in BYTES
        }
        for name, (form, parameters) in forms(T, D, heads, torch.bfloat16).items():
            if causal and "causal" not in name:
                continue
            leaves = [torch.randn(B, T, D, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
            row = timed(partial(form, backend="triton"), [a.requires_grad_() for a in (*leaves, *parameters)])
            found.append({"T": T, "B": B, "form": name} | row | _shares(name, row, B, T, D, limit, best))
            print(found[-1], flush=True)
    return found


def _shares(
    name: str, row: dict[str, Any], B: int, T: int, D: int, limit: dict[str, float], best: dict[str, Any]
) -> dict[str, Any]:
    """Return the fraction of the measured limit that was reached, and the ratio to the best SDPA backend, causal."""
    found: dict[str, Any] = {}
    for way in BYTES.keys() & row.keys():
        if name.startswith("aft_full"):
            work, unit = (4 if way == "forward" else 12) * B * T * T * D / (2 if "causal" in name else 1), "matrix"
        else:
            moved = DECAYED if name.startswith("aft_forget") else BYTES
            work, unit = moved[way] * B * T * D * 2, "copy"
        found[f"{way} share of {unit}"] = work / (row[way] * 1e-3) / limit[unit]
        found[f"{way} x SDPA causal"] = best[way] and best[way] / row[way]
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


def main(argv: list[str] | None = None) -> int:
    """Check, time and write the results; exit with 1 if a check fails, 2 without CUDA."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a batch at any length")
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--causal", action="store_true", help="time the causal forms alone")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument(
        "--dtypes", nargs="+", default=list(map(_name, TOLERANCE)), help="to check; 'none' checks nothing"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/<machine>.json")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py: there is no CUDA device here.", file=sys.stderr)
        return 2
    import triton

    machine = re.sub(r"\W+", "_", torch.cuda.get_device_name().lower())
    report: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    report["checks"] = checks([dtype for dtype in TOLERANCE if _name(dtype) in args.dtypes])
    wrong = [c for c in report["checks"] if not c.get("kept", True)]
    if not wrong and not args.check_only:
        report["limits"] = limits()
        report["options"] = {"tokens": args.tokens, "dim": args.dim, "heads": args.heads, "dtype": "bfloat16"}
        report["times"] = times(args.lengths, args.tokens, args.dim, args.heads, report["limits"], causal=args.causal)
    out = args.out or HERE / "results" / f"{machine}.json"
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{len(report['checks'])} checks, {len(wrong)} wrong; {out}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
