"""Ranks without a row, disks that are full, kernels called by hand, links, and files that are no text."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import torch

from . import LIMIT, attempt, result_of_command


@attempt("a", "Three ranks train on labelled texts whose last batch has one row")
def rank_without_a_row() -> str:
    """Two of them have no targets in it."""
    Path("set").mkdir()
    for split, rows in (("train", 9), ("valid", 3), ("test", 3)):
        lines = [f"{split} {'cd'[i % 2] * (1 + i % 5)} {i * i},{'xy'[i % 2]}" for i in range(rows)]
        Path(f"set/{split}.csv").write_text("\n".join(["text,label", *lines]))
    few = "--model.dim 8 --model.layers 1 --train.steps 6 --train.batch_size 4 --train.log_every 1"
    return result_of_command(
        "train", "sentences", "--data", "set", "--out", "run", "--train.device", "cpu", *few.split(), ranks=3
    )


@attempt("b", "A sweep killed while it writes its results, then started again")
def killed_sweep() -> str:
    """The table is that of a sweep nobody touched."""
    Path("text.txt").write_bytes(bytes(range(32, 127)) * 60)
    small = {"model.dim": 16, "model.layers": 1, "model.max_len": 16, "data.seq_len": 16, "train.batch_size": 2}
    small |= {"train.eval_bytes": 200, "train.eval_batch": 4, "data.source": str(Path("text.txt").resolve())}
    plan = {"recipe": "text", "rows": {"aft_simple": {}}, "rates": [0.001, 0.01], "seeds": [0], "steps": 8, "tune": 0.5}
    Path("plan.json").write_text(json.dumps(plan | {"changes": small}))
    command = [sys.executable, "-m", "tokenmix", "sweep", "plan.json", "--out"]
    subprocess.run([*command, "whole"], capture_output=True, check=True)
    started = subprocess.Popen([*command, "cut"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while started.poll() is None and not list(Path("cut").glob(".results.json-*.tmp")):
        time.sleep(0.0005)
    started.send_signal(signal.SIGKILL)
    if started.wait() != -signal.SIGKILL:
        return "the kill missed"
    subprocess.run([*command, "cut"], capture_output=True, check=True)
    whole, cut = (json.loads(Path(f"{out}/results.json").read_text())["runs"] for out in ("whole", "cut"))
    scores = [{key: (r["score"], r["rate"], r["steps"]) for key, r in runs.items()} for runs in (whole, cut)]
    return "the same scores" if scores[0] == scores[1] else f"{scores[0]} became {scores[1]}"


@attempt("c", "A disk that is full while export-hf writes")
def full_disk() -> str:
    """Files of this process may not grow beyond 2,000 bytes."""
    Path("text.txt").write_bytes(b"the cat sat on the mat. " * 300)
    tiny = "--model.dim 16 --model.layers 1 --data.seq_len 16 --model.max_len 16 --train.steps 1 --train.eval_bytes 100"
    result_of_command("train", "text", "--data", "text.txt", "--out", "run", *tiny.split())
    limited = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limited += "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); from tokenmix.lab import cli; "
    command = [sys.executable, "-c", f"{limited}sys.exit(cli.main(['export', 'run', 'out']))"]
    found = subprocess.run(command, capture_output=True, timeout=LIMIT)
    said = found.stderr.decode().strip().splitlines()[-1]
    return f"exit {found.returncode}: {said[:150]!r}, {'something' if Path('out').exists() else 'nothing'} is left"


@attempt("d", "torch.jit.script of a mixer and of a model")
def script_models() -> str:
    """Whether it says what to use."""
    import tokenmix
    from tokenmix.models import LM, LMConfig

    warnings.simplefilter("ignore")
    model, found = LM(LMConfig(dim=16, vocab=11, max_len=16, mixers=({"name": "hydra"},))), []
    for module in (tokenmix.build_mixer("aft_simple", 16), model):
        try:
            torch.jit.script(module)
            found.append("scripted")
        except Exception as error:  # what is raised is the answer
            found.append(f"{type(error).__name__} of {len(str(error).splitlines())} line: {str(error)[:70]}")
    return "; ".join(found)


@attempt("e", "The kernel of one token of a stream called with a state on meta")
def step_on_meta() -> str:
    """Its address is 0."""
    from tokenmix.kernels.cpu import decode

    past = tuple(torch.zeros(2, 8, dtype=torch.float64, device="meta") for _ in range(3))
    try:
        decode.simple(*(torch.randn(2, 1, 8) for _ in range(3)), None, past)
    except Exception as error:  # what is raised is the answer
        return f"{type(error).__name__}: {error}"
    return "a result"


@attempt("f", "A hook on any part of AFT-forget, on all tokens and in a stream")
def hook_any_part() -> str:
    """One that changes outputs."""
    import tokenmix

    torch.manual_seed(0)
    mixer, x, worst = tokenmix.build_mixer("aft_forget", 16, causal=True).eval(), torch.randn(2, 6, 16), 0.0

    def scale_output(module: object, args: object, out: object) -> object:
        return 1.25 * out if isinstance(out, torch.Tensor) else (1.25 * out[0], *out[1:])

    with torch.no_grad():
        for _, part in list(mixer.named_modules())[1:]:
            hook, state, steps = part.register_forward_hook(scale_output), mixer.init_state(2), []
            for t in range(6):
                y, state = mixer.extend(x[:, t : t + 1], state)
                steps.append(y)
            worst = max(worst, float((mixer(x) - torch.cat(steps, 1)).abs().max()))
            hook.remove()
    return f"off by {worst:.0e}"


@attempt("g", "A Parquet table and a Word document as text")
def documents_as_text() -> str:
    """What is said of each."""
    Path("a.parquet").write_bytes(b"PAR1\x15\x04\0\xff" * 500)
    with zipfile.ZipFile("a.docx", "w") as z:
        z.writestr("[Content_Types].xml", "<x/>")
        z.writestr("word/document.xml", "<x>the cat</x>")
    return "; ".join(
        result_of_command("train", "text", "--data", name, "--out", "run") for name in ("a.parquet", "a.docx")
    )


@attempt("h", "A class folder that links to another class")
def linked_classes() -> str:
    """Each image then has two labels."""
    from PIL import Image

    from tokenmix.lab.data import open_images

    Path("set/cat").mkdir(parents=True)
    for i in range(6):
        Image.new("RGB", (8, 8), (40 * i, 0, 0)).save(f"set/cat/{i}.png")
    Path("set/dog").symlink_to("cat")
    inventory = open_images("set").inventory
    assert inventory is not None
    return "; ".join(f"{name}: {fact}" for name, fact in inventory.found.items() if "link" in name) or "nothing is said"
