"""Other engines: our layers in a loop of accelerate on two processes, and a sweep through submitit."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmix.lab.sweep import Results

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "accelerate_lm.py"
LIMIT = 180


def test_accelerate_launches_our_layers_on_two_processes(capsys):
    pytest.importorskip("accelerate")
    runpy.run_path(str(EXAMPLE))["train"](3, own_accelerator())
    one = losses(capsys.readouterr().out, 1)
    asked = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    asked += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([*asked, EXAMPLE, "--steps", "3"], env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(done.stdout, 2) == pytest.approx(one, rel=1e-6)


def own_accelerator():
    """The example's, in this process."""
    from accelerate import Accelerator

    return Accelerator(cpu=True, gradient_accumulation_steps=2)


def losses(said: str, processes: int) -> list[float]:
    found = re.findall(rf"^step \d+: (\S+) nats on {processes} processes$", said, flags=re.MULTILINE)
    assert len(found) == 3, said
    return [float(each) for each in found]


def test_a_sweep_runs_through_submitit(tmp_path, monkeypatch):
    """The snippet of the page as it stands, with submitit's local executor."""
    pytest.importorskip("submitit")
    page = (ROOT / "docs" / "scale.md").read_text()
    snippet = re.search(r"^```text\n(import sys\n\nimport submitit\n.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(32, 127)) * 60)
    small = {"model.dim": 16, "model.layers": 1, "model.max_len": 16, "data.seq_len": 16, "train.batch_size": 2}
    small |= {"train.eval_bytes": 200, "train.eval_batch": 4, "data.source": str(text), "train.device": "cpu"}
    rows = {"aft_simple": {}, "hydra": {}}
    plan = {"recipe": "text", "rows": rows, "rates": [1e-3, 1e-2], "seeds": [0], "steps": 4, "changes": small}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    monkeypatch.chdir(tmp_path)
    assert snippet is not None
    exec(snippet[1], {"__name__": "__main__"})
    assert Results.open(tmp_path / "shared.json").plan.rows.keys() == rows.keys()
    found = {(run["phase"], run["row"]) for run in Results.open(tmp_path / "shared.json").runs.values()}
    assert found == {(phase, row) for phase in ("tune", "final") for row in rows}
