"""Kill a training run again and again, resume it each time, and prove that nothing shows.

`python tests/kill_nine.py --times 10`. One kill lands before the first checkpoint, one inside the writing of a
checkpoint, the others at random moments (SIGKILL, which no process can catch). Every logged loss and evaluation, and
every byte of the final weights and optimiser state, must equal those of a run nobody touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

TIMING = ("seconds", "peak_mib")
SMOKE = [
    "text",
    "--row",
    "aft_local",
    "--size",
    "smoke",
    "--model.dim",
    "64",
    "--model.dropout",
    "0.1",
    "--train.accumulate",
    "2",
]
SPEED = [
    "--train.steps",
    "150",
    "--train.log_every",
    "1",
    "--train.eval_every",
    "30",
    "--train.save_every",
    "10",
    "--train.eval_bytes",
    "4000",
]


def start(*args: str) -> subprocess.Popen:
    """A tokenmix command in its own process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tokenmix", *args], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> None:
    """Wait for it; anything but success is an error."""
    _, errors = process.communicate()
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}: {errors}")


def lines(run: Path) -> list[dict]:
    """The whole lines of metrics.jsonl, without what may differ: the timing."""
    found = []
    text = (run / "metrics.jsonl").read_text() if (run / "metrics.jsonl").exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            found.append({k: v for k, v in json.loads(line).items() if k not in TIMING and not k.endswith("_per_s")})
    return found


def last_step(run: Path) -> int:
    """The last logged step."""
    return max((line["step"] for line in lines(run)), default=0)


def checkpoints(run: Path) -> list[Path]:
    """Finished checkpoints."""
    return sorted((run / "checkpoints").glob("step_*"))


def kill_when(process: subprocess.Popen, ready: Callable[[], bool], pause: float = 0.0) -> bool:
    """SIGKILL the process a moment after ``ready``; False if it ended before."""
    while not ready():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    time.sleep(pause)
    process.kill()
    process.wait()
    return process.returncode == -signal.SIGKILL


def kill_inside_checkpoint(process: subprocess.Popen, run: Path) -> bool:
    """SIGKILL the process while a checkpoint is half written.

    Freeze it when the temporary directory is seen, and kill it if the directory is still there.
    """
    while process.poll() is None:
        if any((run / "checkpoints").glob(".tmp-*")):
            process.send_signal(signal.SIGSTOP)
            if any((run / "checkpoints").glob(".tmp-*")):
                process.kill()
                process.wait()
                return any((run / "checkpoints").glob(".tmp-*"))
            process.send_signal(signal.SIGCONT)
    return False


def torture(folder: Path, times: int, train: list[str], *, seed: int = 0, say: Callable[[str], None] = print) -> None:
    """Train once untouched and once with ``times`` kills, and compare."""
    whole, broken = folder / "whole", folder / "broken"
    finish(start("train", *train, "--out", str(whole)))
    expected = lines(whole)
    total, rng = last_step(whole), random.Random(seed)
    say(f"untouched: {total} steps, {len(expected)} lines")
    process = start("train", *train, "--out", str(broken))
    done = 0
    while done < times:
        if done == 0:
            kind, hit = "before the first checkpoint", kill_when(process, lambda: len(lines(broken)) >= 1)
            hit = hit and not checkpoints(broken)
        elif done == 1:
            kind, hit = "inside a checkpoint", kill_inside_checkpoint(process, broken)
        else:
            here = last_step(broken)
            target = here + rng.randint(0, max(1, 2 * (total - here) // (times - done + 1)) - 1)
            first = len(checkpoints(broken)) and int(checkpoints(broken)[-1].name[5:])
            target = min(max(target, first + 1), total - 1)
            kind, hit = (
                "at a random moment",
                kill_when(process, lambda t=target: last_step(broken) >= t, rng.random() * 0.05),
            )
        if not hit:
            raise SystemExit(
                f"kill {done + 1} ({kind}) missed: "
                f"the run was at step {last_step(broken)} of {total}; choose more steps"
            )
        seen = lines(broken)
        if [line for line in seen if line not in expected]:
            raise SystemExit(f"after kill {done + 1} a logged line differs from the untouched run")
        done += 1
        say(f"kill {done} {kind}: at step {last_step(broken)}, {len(checkpoints(broken))} checkpoints")
        process = start("resume", str(broken))
    finish(process)
    compare(whole, broken)
    say(f"{times} kills: {len(expected)} logged lines and the final weights are the same to the bit")


def compare(whole: Path, broken: Path) -> None:
    """Every logged number and every byte of the final state."""
    if lines(whole) != lines(broken):
        pairs = zip(lines(whole), lines(broken), strict=False)
        raise SystemExit(f"metrics differ: {[pair for pair in pairs if pair[0] != pair[1]][:1]}")
    for name in ("model.safetensors", "optimizer.safetensors", "rng.safetensors"):
        a, b = ((checkpoints(run)[-1] / name).read_bytes() for run in (whole, broken))
        if a != b or not a:
            raise SystemExit(f"{name} of the final checkpoint differs")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", default="stdlib")
    options, extra = parser.parse_known_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        torture(Path(folder), options.times, [*SMOKE, "--data", options.data, *SPEED, *extra], seed=options.seed)


if __name__ == "__main__":
    main()
