"""Distil the model with another mixer from itself, for some minutes on a given text, and write it."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from ...errors import MixerError
from ...hosts.surgery import find_attention, replace_mixers
from ...hosts.surgery.save_load import save_replaced
from ...hosts.surgery.texts import check_vocabulary, text_tokens
from ...types import Options, Record, Spec
from ..train.distill_mixers import distill
from ..train.rundir import RunDir
from .advice import Advice
from .compare import compare
from .loading import Host

LENGTH, BATCH = 128, 8
VALID = 0.1  # of the batches, at the end of the text, for validation
SPARE = 0.8  # of the minutes, for training steps; the rest is for the trial step, evaluations and files
LEARNING_RATE = 1e-3


def takes_data(host: Host) -> bool:
    """Return whether a host is a folder of transformers, of which --data can distil a language model."""
    return host.origin == "transformers" and Path(host.name.removeprefix("hf:")).is_dir()


def quality_command(host: Host) -> str:
    """Say what measures the quality of a host with another mixer."""
    if not host.trained:
        return "these weights are random; give trained ones, then --data TEXT --write FOLDER distils and compares"
    if takes_data(host):
        return "--data TEXT --write FOLDER distils the choice, and compares it with the model on text held out"
    if host.origin == "tokenmix":
        return "`tokenmix train` trains the same model with the mixer"
    return "tokenmix.lab.train.distill, with valid=, distils a candidate and compares it with the model"


def check_distillation(host: Host, data: Path, out: Path | None, last: int | None = None) -> None:
    """Refuse, before anything is measured, what could not be distilled."""
    name, origin = host.name, host.origin
    if not takes_data(host):
        own = (
            "`tokenmix train` continues training a run"
            if origin == "tokenmix"
            else "`tokenmix convert` and tokenmix.lab.train.distill take other models"
        )
        wanted = "a language model in a folder of transformers, with its tokenizer"
        raise MixerError(f"advise: --data distils {wanted}, got {name}; {own}.")
    if not host.trained:
        raise MixerError(f"advise: --data: {name}: {'; '.join(host.notes)}, and noise would be distilled.")
    if any(p.dtype == torch.float16 for p in host.model.parameters()):
        converted = "save it in float32, model.float().save_pretrained(folder)"
        raise MixerError(f"advise: --data: {name} is float16, in which training steps become NaN; {converted}.")
    if last is not None and not 1 <= last <= (many := len(find_attention(host.model))):
        raise MixerError(f"advise: --last must be in 1..{many}, the attention modules of {name}, got {last}.")
    if not data.is_file():
        raise MixerError(f"advise: --data {data}: no such file; a text file is needed.")
    if out is None:
        raise MixerError("advise: --data needs --write DIR, the folder for the converted model.")
    if out.exists():
        raise MixerError(f"advise: --write {out}: exists already; give another folder.")


def distill_choice(
    advice: Advice,
    batches: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]],
    out: Path,
    *,
    minutes: float,
    seconds: float = 10.0,
    last: int | None = None,
) -> Record:
    """Replace attention by the chosen candidate, distil, write model and run, and compare it with what was before.

    Return what ``Advice.distilled`` holds.

    The loss is that of ``distill`` over the last tenth of the text: the KL divergence of the student's predictions from
    the teacher's, or the distance of the last hidden states where a model predicts nothing.

    Args:
        batches: for training and for validation, as ``split_text`` makes them.
        seconds: about what timing the models at the lengths of the advice may take.
        last: replace only the last N attention modules.
    """
    teacher, spec = advice.host.model, chosen_spec(advice)
    train, valid = batches
    mixers = spec if advice.plan is None else advice.plan.mixers
    student, report = replace_mixers(teacher, mixers, last=last, seed=0)
    untaught = copy.deepcopy(student).eval()
    each = _step_seconds(teacher, student, train[0])
    steps = max(2, int(SPARE * 60 * minutes / each))
    run, began = out.with_name(f"{out.name}-distillation"), time.perf_counter()
    settings: Options = {
        "layer_steps": steps // 2,
        "steps": steps - steps // 2,
        "eval_every": steps,
        "save_every": steps,
    }
    distill(teacher, student, train, valid=valid, out=run, lr=LEARNING_RATE, verbose=False, **settings)
    took = time.perf_counter() - began
    save_replaced(student.eval(), out, report, beside=Path(advice.host.name.removeprefix("hf:")))
    losses = [line["output_loss"] for line in RunDir.open(run).read_metrics() if line["kind"] == "eval"]
    found = {
        "mixer": spec["name"],
        "spec": spec,
        "layers": last or len(advice.modules if advice.plan is None else advice.plan.chosen),
        "steps": steps,
        "seconds": took,
        "loss": "validation loss",
    }
    found |= {"loss_before": losses[0], "loss_after": losses[-1], "out": str(out), "run": str(run)}
    models = {"teacher": teacher, "replaced": untaught, "distilled": student}
    lengths = [s.length for s in advice.shares]
    compared = compare(models, valid, lengths, inputs=advice.host.inputs, batch=advice.batch, seconds=seconds)
    return found | {"comparison": compared.to_json(), "table": compared.table()}


def chosen_spec(advice: Advice) -> Spec:
    """Return the candidate that the advice chooses by its rule."""
    if advice.choice is None:
        why = next((r.why for r in advice.rows if r.why), "none was measured")
        raise MixerError(f"advise: no candidate fits this model ({why}).")
    return advice.specs[advice.choice.row.mixer]


def split_text(host: Host, data: Path) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Split the text into pieces of equal length: batches for training, and the last tenth for validation."""
    folder = Path(host.name.removeprefix("hf:"))
    ids = text_tokens("advise", folder, data)
    check_vocabulary("advise", folder, host.model, ids)
    length = min(LENGTH, host.inputs.limit or LENGTH)
    rows = ids[: len(ids) // length * length].view(-1, length)
    if len(rows) < 2:
        raise MixerError(f"advise: --data {data}: has {len(ids):,} tokens; at least {2 * length:,} are needed.")
    held = max(1, int(VALID * len(rows)))
    device = next(host.model.parameters()).device
    parts = ([{"input_ids": piece.to(device)} for piece in part.split(BATCH)] for part in (rows[:-held], rows[-held:]))
    train, valid = parts
    return train, valid[:8]


def _step_seconds(teacher: nn.Module, student: nn.Module, batch: dict[str, Tensor]) -> float:
    """Time one step on a copy: the teacher's pass, the student's and its gradients."""
    tried = copy.deepcopy(student).train()
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        with torch.no_grad():
            teacher(**batch)
        outputs = tried(**batch)
        outputs[0].float().square().mean().backward()
        best = min(best, time.perf_counter() - start)
    return best
