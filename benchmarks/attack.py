"""Attack the library at random for a while, and print every answer that is neither right nor one clear refusal.

    python benchmarks/attack.py --minutes 20                        # all four kinds in turn
    python benchmarks/attack.py --minutes 5 --kind states --seed 7  # one kind, from one seed
    python benchmarks/attack.py --kind inputs --only 123456         # one attack again, by the number that was printed

Kinds: *states* of other dtypes, shapes, devices and mixers; *inputs* that are NaN or infinite, at every position, on
every backend; *archives* of images, with bytes flipped, cut and spliced; *runs*, whose files are damaged before resume,
eval, report and sample. The last line counts attacks and findings.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests")]
WORK = Path(tempfile.mkdtemp(prefix="attack-"))
os.environ["XDG_CACHE_HOME"] = str(WORK / "cache")

import tokenmix  # noqa: E402  (after the cache was moved)
from cases import CASES, GRIDS  # noqa: E402  (as above)
from tokenmix import MixerError  # noqa: E402  (as above)
from tokenmix.testing.subject import Subject, subject  # noqa: E402  (as above)

CLOSE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.15, torch.float16: 0.05}
BACKENDS = ("eager", "auto")


class Finding(Exception):
    """Report an answer that is neither right nor refused."""


def drawn(rng: random.Random, *, streams: bool) -> tuple[str, Subject, bool]:
    """Draw a row of the contract's cases, and whether it is causal."""
    while True:
        case = rng.choice(list(CASES))
        name, options = CASES[case]
        causal = streams or rng.random() < 0.6
        cls = tokenmix.MIXERS[name]
        if (
            (causal and case in GRIDS)
            or causal not in cls.facts.causal_forms()
            or (streams and not cls.facts.streaming)
        ):
            continue
        grid, prefix = GRIDS.get(case, (None, 0))
        return (
            case,
            subject(name, {**options, **({"causal": True} if causal else {})}, grid=grid, prefix=prefix),
            causal,
        )


def off(got: Tensor, want: Tensor) -> float:
    """Return the largest difference relative to the size of what is wanted; infinite where only one is finite."""
    if not torch.equal(got.isfinite(), want.isfinite()):
        return float("inf")
    there = want.isfinite()
    return (
        float((got - want)[there].double().abs().max() / want[there].double().abs().max().clamp_min(1))
        if bool(there.any())
        else 0.0
    )


# states


def changed(rng: random.Random, state: Any) -> tuple[str, Any, torch.dtype | None]:
    """Change a state so that it is not quite what the mixer wrote.

    Returns (what was done, the state, the narrowest dtype in which it must still be right; None: it must be refused).
    """
    fields = list(state)
    tensors = [i for i, a in enumerate(fields) if isinstance(a, Tensor)]
    i = rng.choice(tensors)
    a, narrow = fields[i], rng.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
    integer = torch.int32 if a.dtype != torch.int32 else torch.int16
    ways: dict[str, tuple[Callable[[], Tensor], torch.dtype | None]] = {
        "as integers": (lambda: a.nan_to_num(0, 0, 0).to(integer), None),
        "with one more feature": (
            lambda: torch.cat([a, a[..., :1]], -1) if a.ndim > 1 else torch.cat([a, a[:1]]),
            None,
        ),
        "without its last axis": (lambda: a.sum(-1).to(a.dtype) if a.ndim > 1 else a[:0], None),
        "with one row less": (lambda: a[1:], None),
        "on meta": (lambda: a.to("meta"), None),
        "not contiguous": (lambda: torch.stack([a, a], -1)[..., 0], torch.float64),
        "flipped in memory": (lambda: a.flip(0).flip(0).mT.contiguous().mT if a.ndim > 1 else a.clone(), torch.float64),
    }
    if a.is_floating_point():
        ways[f"as {narrow}"] = (lambda: a.to(narrow), narrow)
    what = rng.choice(list(ways))
    make, exact = ways[what]
    fields[i] = make()
    if exact is None and fields[i].shape == a.shape and fields[i].dtype == a.dtype and fields[i].device == a.device:
        exact = torch.float64  # nothing changed
    if rng.random() < 0.1:
        return f"{what}, as a plain tuple", tuple(fields), None
    return f"field {type(state).__name__}.{state._fields[i]} {what}", type(state)(*fields), exact


def attack_state(rng: random.Random) -> str:
    """Continue a stream from a state that was changed, or from another mixer's state."""
    case, s, _ = drawn(rng, streams=True)
    dtype = rng.choice([torch.float32, torch.float64])
    mixer, T = s.build(dtype=dtype), s.length
    x, cut = s.x(2, T, dtype=dtype), rng.randrange(0, s.length - 1)
    begin = mixer.init_state(2)
    state = mixer.extend(x[:, :cut], begin)[1] if cut else begin
    n = rng.choice([1, T - cut])
    want = mixer.extend(x[:, cut : cut + n], state)[0]
    if rng.random() < 0.4:
        other_case, o, _ = drawn(rng, streams=True)
        other = o.build(dtype=dtype)
        foreign = (
            other.init_state(2) if rng.random() < 0.5 else other.extend(o.x(2, 3, dtype=dtype), other.init_state(2))[1]
        )
        same = type(foreign) is type(state) and all(
            a.ndim == b.ndim and a.shape[2:] == b.shape[2:] for a, b in zip(foreign, state, strict=True)
        )
        what, given, exact = f"state of {other_case}", foreign, None
        if same or type(other) is type(mixer):
            return f"{case} <- {other_case}: alike"
    else:
        what, given, exact = changed(rng, state)
    try:
        got = mixer.extend(x[:, cut : cut + n], given)[0]
    except MixerError:
        return f"{case}: {what}: refused"
    if exact is None:
        raise Finding(f"{case} {dtype}: {what} at {cut} + {n} is accepted")
    error = off(got, want)
    bound = CLOSE[min((exact, dtype), key=lambda d: torch.finfo(d).bits)]
    if not error <= bound:
        raise Finding(f"{case} {dtype}: {what} at {cut} + {n} is off by {error:.2g}")
    return f"{case}: {what}: right"


# inputs


def attack_input(rng: random.Random) -> str:
    """Make one token NaN or infinite: rows that may not attend it must stay as they are.

    This holds on each backend, for whole sequences and for streams alike.
    """
    case, s, causal = drawn(rng, streams=False)
    dtype, T = rng.choice([torch.float32, torch.float64]), s.length
    mixer, x, p = s.build(dtype=dtype), s.x(3, s.length, dtype=dtype), rng.randrange(s.length)
    bad = rng.choice([float("nan"), float("inf"), -float("inf")])
    spoilt = x.clone()
    channels = slice(None) if rng.random() < 0.5 else slice(0, 1)
    spoilt[1, p, channels] = bad
    mask = None
    if rng.random() < 0.4:
        mask = torch.rand(3, T, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))) < 0.8
        mask[1, p] = rng.random() < 0.3
    hidden = mask is not None and not bool(mask[1, p])
    may = torch.zeros(3, T, dtype=torch.bool)
    may[1, (p if causal else 0) :] = True
    if hidden:
        may[1] = False
        may[1, p] = True  # its own output is unspecified
    what = f"{case}{' causal' if causal else ''} {dtype} token {p} of {T} {'masked ' if hidden else ''}is {bad}"
    for backend in BACKENDS:
        with tokenmix.use_backend(backend):
            got, want = s.call(mixer, spoilt, key_mask=mask), s.call(mixer, x, key_mask=mask)
            kept = ~may if mask is None else ~may & mask
            error = off(got[kept], want[kept]) if bool(kept.any()) else 0.0
            if not error <= CLOSE[dtype]:
                raise Finding(f"{what}: {backend}: rows that may not attend it change by {error:.2g}")
            if hidden and not bool(got[1, p].isfinite().all()) and mask is not None and not s.grid:
                pass  # unspecified where the input itself is not finite
            if not hidden and bad != bad and bool(got[1, p].isfinite().all()) and not mixer.waived():
                raise Finding(f"{what}: {backend}: the row of the NaN itself is finite")
            if causal and mixer.capabilities.streaming and mask is None:
                cut, state, parts = rng.randrange(1, T), mixer.init_state(3), []
                for piece in (spoilt[:, :cut], spoilt[:, cut:]):
                    y, state = mixer.extend(piece, state)
                    parts.append(y)
                streamed = torch.cat(parts, 1)
                if not off(streamed[kept], want[kept]) <= CLOSE[dtype]:
                    raise Finding(f"{what}: {backend}: streamed at {cut}, rows that may not attend it change")
    return what


# archives


def write_images(folder: Path) -> None:
    """Write two classes of small PNGs in a folder, a zip, a tar and an npz."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for part in ("train", "valid", "test"):
        for label in ("cat", "dog"):
            (folder / "tree" / part / label).mkdir(parents=True)
            for i in range(3):
                pixels = generator.integers(0, 255, (8, 8, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / "tree" / part / label / f"{i}.png")
    with zipfile.ZipFile(folder / "set.zip", "w", zipfile.ZIP_DEFLATED) as z:
        for file in sorted((folder / "tree").rglob("*.png")):
            z.write(file, file.relative_to(folder / "tree"))
    np.savez_compressed(
        folder / "set.npz", images=generator.integers(0, 255, (30, 8, 8, 3), dtype=np.uint8), labels=np.arange(30) % 2
    )
    (folder / "text.txt").write_bytes(b"to be or not to be\n" * 400)
    with tarfile.open(folder / "text.tar.gz", "w:gz") as t:
        t.add(folder / "text.txt", "text.txt")
    with zipfile.ZipFile(folder / "text.zip", "w", zipfile.ZIP_DEFLATED) as z:
        z.write(folder / "text.txt", "text.txt")


def damage(rng: random.Random, data: bytes) -> bytes:
    """Flip, cut, double, splice or replace bytes."""
    b, n = bytearray(data), len(data)
    way = rng.randrange(6)
    if n == 0 or way == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(64)))
    if way == 1:
        return bytes(b[: rng.randrange(n)])
    if way == 2:
        at = rng.randrange(n)
        return bytes(b[:at] + b[rng.randrange(n) :])
    for _ in range(rng.choice([1, 1, 4, 32])):
        b[rng.randrange(n)] = rng.randrange(256)
    return bytes(b)


def attack_archive(rng: random.Random) -> str:
    """Damage an archive or folder: it is read or refused in one line; no crash, hang or access outside."""
    from tokenmix.lab.data import open_corpus, open_images

    source = WORK / "sources"
    if not source.exists():
        source.mkdir()
        write_images(source)
    here = WORK / "now"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    name = rng.choice(["set.zip", "set.npz", "tree", "text.tar.gz", "text.zip"])
    if name == "tree":
        shutil.copytree(source / "tree", here / "tree")
        victims = rng.sample(sorted((here / "tree").rglob("*.png")), 2)
        for victim in victims:
            victim.write_bytes(damage(rng, victim.read_bytes()))
    else:
        (here / name).write_bytes(damage(rng, (source / name).read_bytes()))
    try:
        if name.startswith("text"):
            open_corpus(str(here / name))
        else:
            open_images(str(here / name))
    except MixerError as why:
        if "\n" in str(why):
            raise Finding(f"{name}: the refusal has several lines: {why}") from why
        return f"{name}: refused"
    return f"{name}: read"


# runs


def said(*args: str) -> tuple[int, str]:
    """Return the exit code and output of a command."""
    from tokenmix.lab.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = main(list(args))
    return code, out.getvalue()


def attack_run(rng: random.Random) -> str:
    """Damage or remove a file of a run directory: every verb goes on correctly or refuses in one line."""
    from run_dirs import tiny_run

    whole = WORK / "runs"
    if not whole.exists():
        whole.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            tiny_run(whole, "local")
    here = WORK / "damaged"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(whole / "local", here)
    files = sorted(p for p in here.rglob("*") if p.is_file())
    victim = rng.choice(files)
    way = rng.choice(["damaged", "damaged", "removed", "emptied"])
    if way == "removed":
        victim.unlink()
    else:
        victim.write_bytes(b"" if way == "emptied" else damage(rng, victim.read_bytes()))
    verb = rng.choice(["resume", "eval", "sample", "report"])
    more = ["--out", str(WORK / "page.html")] if verb == "report" else ["--bytes", "8"] if verb == "sample" else []
    code, text = said(verb, str(here), *more)
    what = f"{victim.relative_to(here)} {way}, then {verb}"
    if code not in (0, 2):
        raise Finding(f"{what}: exit code {code}: {text[-200:]}")
    if code == 2 and text.strip().count("\n") > 3:
        raise Finding(f"{what}: a refusal of {text.count(chr(10))} lines: {text[:300]}")
    return f"{verb}: {'went on' if code == 0 else 'refused'}"


KINDS: dict[str, Callable[[random.Random], str]] = {
    "states": attack_state,
    "inputs": attack_input,
    "archives": attack_archive,
    "runs": attack_run,
}


def main() -> int:
    """Attack until the time is up."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only this kind; may be given again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="repeat the attack of this number")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds, stop = args.kind or list(KINDS), time.monotonic() + 60 * args.minutes
    made, found, outcomes, number = (
        collections.Counter(),
        collections.Counter(),
        collections.Counter(),
        args.seed * 10_000_000,
    )
    while time.monotonic() < stop:
        kind = kinds[number % len(kinds)]
        try:
            told = KINDS[kind](random.Random(number if args.only is None else args.only))
            outcomes[kind, told.rsplit(": ", 1)[-1] if kind != "inputs" else "held"] += 1
            if args.only is not None:
                print(told)
        except Finding as why:
            found[kind] += 1
            print(f"{kind} {number}: {why}", flush=True)
        except Exception as why:  # whatever it is, it is no clear refusal
            found[kind] += 1
            last = traceback.extract_tb(why.__traceback__)[-1]
            print(
                f"{kind} {number}: {type(why).__name__}: {' '.join(str(why).split())[:200]} "
                f"({Path(last.filename).name}:{last.lineno})",
                flush=True,
            )
        made[kind] += 1
        number += 1
        if args.only is not None:
            break
    shutil.rmtree(WORK, ignore_errors=True)
    print("; ".join(f"{kind}: {n} attacks, {found[kind]} findings" for kind, n in sorted(made.items())))
    print("; ".join(f"{kind} {what}: {n}" for (kind, what), n in sorted(outcomes.items())))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
