"""Kill one process of torchrun again and again, let it restart all, and prove that nothing shows.

`python tests/kill_ranks.py --times 5`. A random one of two ranks is killed at random moments (SIGKILL). The weights at
the end and every logged number must equal, to the bit, those of two ranks that nobody touched.
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

import torch

import kill_nine
from tokenmix.lab.train import load_run

RUN = str(Path(__file__).with_name("ranks_training.py"))
STEPS, SAVE = 30, 5


def torchrun(out: Path, changes: dict, *, ranks: int = 2, restarts: int = 0, full: str = "none") -> subprocess.Popen:
    """Start the ranks of this machine by torchrun."""
    asked = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    asked += ["--max-restarts", str(restarts), RUN, str(out), full, *(json.dumps(item) for item in changes.items())]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(asked, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def ranks_of(started: subprocess.Popen) -> list[int]:
    """The processes of the ranks, as the system lists them."""
    found = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    return [int(pid) for pid in found if "ranks_training" in Path(f"/proc/{pid}/cmdline").read_text()]


def end_of(started: subprocess.Popen, limit: float = 240) -> str:
    """Wait for it; return what it said, or raise if it failed."""
    _, said = started.communicate(timeout=limit)
    if started.returncode:
        raise SystemExit(f"torchrun ended with {started.returncode}: {said[-3000:]}")
    return said


def torture(folder: Path, times: int, *, seed: int = 0, say: Callable[[str], None] = print) -> None:
    """Train once untouched and once with ``times`` kills, and compare."""
    changes = {"train.shard": "fsdp", "train.steps": STEPS, "train.save_every": SAVE, "model.dropout": 0.1}
    end_of(torchrun(folder / "whole", changes))
    broken, rng = folder / "broken", random.Random(seed)
    started = torchrun(broken, changes, restarts=times + 1)
    for done in range(times):
        first = max(kill_nine.last_step(broken) if broken.is_dir() else 0, done * STEPS // times)
        target, seen = min(first + rng.randint(1, STEPS // times), STEPS - 1), set(ranks_of(started))
        while not broken.is_dir() or kill_nine.last_step(broken) < target or (done and not _resumed(broken, done)):
            if started.poll() is not None:
                raise SystemExit(f"kill {done + 1} missed: the run ended; {started.communicate()[1][-2000:]}")
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        seen = ranks_of(started)
        os.kill(rng.choice(seen), signal.SIGKILL)
        say(f"kill {done + 1} of 1 of {len(seen)} ranks at step {kill_nine.last_step(broken)}")
        while set(ranks_of(started)) & set(seen) and started.poll() is None:
            time.sleep(0.05)
    end_of(started)
    compare(folder / "whole", broken)
    say(f"{times} kills: {len(kill_nine.lines(broken))} logged lines and the final weights are the same to the bit")


def _resumed(run: Path, times: int) -> bool:
    return len(json.loads((run / "env.json").read_text())["resumed"]) >= times


def compare(whole: Path, broken: Path) -> None:
    """Every logged number and the final weights."""
    if kill_nine.lines(whole) != kill_nine.lines(broken):
        pairs = zip(kill_nine.lines(whole), kill_nine.lines(broken), strict=False)
        raise SystemExit(f"metrics differ: {[pair for pair in pairs if pair[0] != pair[1]][:1]}")
    a, b = (load_run(run)[0].state_dict() for run in (whole, broken))
    different = [name for name in a if not torch.equal(a[name], b[name])]
    if different or not a:
        raise SystemExit(f"final weights differ: {different}")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torture(Path(folder), options.times, seed=options.seed)


if __name__ == "__main__":
    main()
