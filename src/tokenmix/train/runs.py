"""Using a run that exists: load its model, evaluate it, sample from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..data import Corpus, open_corpus
from ..errors import MixerError
from ..mixers import state_bytes
from ..models import build_model
from .checkpoint import list_steps, load_checkpoint
from .config import DataConfig, RunConfig
from .evaluate import EvalResult, evaluate
from .rundir import RunDir


def pick_device(name: str) -> torch.device:
    """The torch device of a name; "auto" is CUDA where it works, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MixerError(f"device={name!r} is unknown; choose 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise MixerError(f"device={name!r}: torch {torch.__version__} sees no CUDA device here; use 'cpu' or 'auto'.")
    return device


def open_data(config: DataConfig) -> Corpus:
    """The corpus of a config, long enough for its sequences."""
    corpus = open_corpus(config.source, path=config.path, split=config.split)
    corpus.check_length(config.seq_len)
    return corpus


def same_corpus(corpus: Corpus, env: dict[str, Any]) -> None:
    """Refuse a corpus whose bytes are not those the run was trained on."""
    then = env.get("corpus", {})
    if then and (then["bytes"], then["sha256"]) != (corpus.size, corpus.sha256):
        raise MixerError(
            f"the corpus {corpus.name} ({corpus.path}) changed since this run began: it had {then['bytes']} bytes with sha256 {then['sha256'][:16]}..., "
            f"now {corpus.size} with {corpus.sha256[:16]}...; bring the old one back, or start a new run."
        )


def pick_step(run: RunDir, step: int | str = "last") -> int:
    """The step of the checkpoint meant by a number, "last" or "best"."""
    steps = list_steps(run.checkpoints)
    if not steps:
        raise MixerError(f"{run.path} has no checkpoint yet; `tokenmix resume {run.path}` goes on from the start.")
    if step == "last":
        return steps[-1]
    if step == "best":
        _, progress = load_checkpoint(run.checkpoints, steps[-1])
        return steps[-1] if progress["best_step"] is None else progress["best_step"]
    try:
        return int(step)
    except ValueError:
        raise MixerError(f"step must be a number, 'last' or 'best', got {step!r}.") from None


def load_run(path: Path | str, *, step: int | str = "last", device: str = "cpu") -> tuple[nn.Module, RunConfig]:
    """The model of a run at a checkpoint, in eval mode, and the run's config.

    Args:
        step: a number, "last" or "best" (lowest bits per byte on the validation split).
    """
    run = RunDir.open(path)
    config = run.config()
    tensors, _ = load_checkpoint(run.checkpoints, pick_step(run, step), "model")
    with torch.random.fork_rng():
        model = build_model(config.model)
    load_weights(model, tensors["model"], run.path)
    return model.to(pick_device(device)).eval(), config


def load_weights(model: nn.Module, tensors: dict[str, torch.Tensor], where: Path) -> None:
    """Put weights into a model they must fit exactly."""
    try:
        model.load_state_dict(tensors)
    except RuntimeError as why:
        raise MixerError(f"{where}: the checkpoint does not fit the model of config.json ({' '.join(str(why).split())[:300]}).") from None


def evaluate_run(
    path: Path | str,
    *,
    split: str = "test",
    stride: int | None = None,
    seq_len: int | None = None,
    max_bytes: int | None = None,
    step: int | str = "last",
    device: str = "auto",
    record: bool = True,
) -> EvalResult:
    """Bits per byte of a run on one split of its corpus; added to the run's metrics.jsonl unless ``record`` is False."""
    run = RunDir.open(path)
    model, config = load_run(path, step=step, device=device)
    corpus = open_data(config.data)
    same_corpus(corpus, run.env())
    options: dict[str, Any] = {"seq_len": seq_len or config.data.seq_len, "stride": stride, "max_bytes": max_bytes}
    result = evaluate(model, corpus.split(split), batch_size=config.train.eval_batch, precision=config.train.precision, **options)
    if record:
        run.append(eval_line(split, pick_step(run, step), result))
    return result


def eval_line(split: str, step: int, result: EvalResult) -> dict[str, Any]:
    """An evaluation as a line of metrics.jsonl."""
    return {
        "kind": "eval",
        "split": split,
        "step": step,
        "bits_per_byte": result.bits_per_byte,
        "bytes": result.bytes,
        "seq_len": result.seq_len,
        "stride": result.stride,
        "seconds": round(result.seconds, 3),
    }


def sample_run(
    path: Path | str,
    *,
    n: int = 500,
    prompt: bytes = b"\n",
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    step: int | str = "last",
    device: str = "auto",
) -> bytes:
    """Prompt and continuation as bytes, from a run's model."""
    model, _ = load_run(path, step=step, device=device)
    return continue_bytes(model, prompt, n, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)


def continue_bytes(model: Any, prompt: bytes, n: int, **sampling: Any) -> bytes:
    """The prompt and n more bytes."""
    if not prompt:
        raise MixerError("the prompt is empty; a language model needs at least one byte to begin with.")
    tokens = torch.tensor([list(prompt)], device=next(model.parameters()).device)
    return bytes(model.generate(tokens, n, **sampling)[0].tolist())


@torch.no_grad()
def streaming_cost(model: Any, context: int = 1024) -> dict[str, int]:
    """Bytes of streaming state one row holds after ``context`` tokens (fewer where the model is shorter)."""
    length = min(context, model.max_len or context)
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    _, state = model.extend(torch.zeros(1, length, dtype=torch.long, device=device), model.init_state(1))
    model.train(was_training)
    return {"state_bytes_per_row": state_bytes(state), "state_context": length}
