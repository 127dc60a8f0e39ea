"""What convert, eval and sample do with a folder of `tokenmix convert` or of transformers instead of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import MixerError
from .arguments import given_options
from .output import say

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ..advise.compare import Comparison


TEXT = {"dir", "data", "seq_len", "max_bytes", "device", "json"}
SAMPLING = {"dir", "tokens", "prompt", "temperature", "top_k", "top_p", "seed", "device", "json"}


def is_host_folder(folder: Path | str) -> bool:
    """Return whether a folder holds a host: one that `tokenmix convert` wrote by surgery, or one of transformers."""
    file = Path(folder) / "config.json"
    if not file.is_file():  # a pipe would never answer
        return False
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError):
        return False
    return isinstance(config, dict) and (config.get("kind") == "surgery" or "model_type" in config)


def compare_converted(source: str, out: Path, data: Path | None, lengths: Sequence[int]) -> Comparison:
    """Compare the host that was converted with the folder that was written."""
    from ...hosts.surgery import load_converted, open_host
    from ...hosts.surgery.texts import text_batches
    from ..advise.compare import compare

    if not is_host_folder(out):
        raise MixerError(f"convert: {out} is written; --data and --lengths compare hosts, and this is a ViT of ours.")
    models = {"before": open_host(source)[0], "after": load_converted(out)}
    try:
        batches = None if data is None else text_batches("convert", models["before"], out, data)
        return compare(models, batches, lengths)
    except MixerError as why:
        raise MixerError(f"convert: {out} is written, but the models were not compared: {why}") from None


def evaluate_host(verb: Any) -> int:
    """Score a text with a host's folder and print the perplexity."""
    from ...hosts.surgery.texts import evaluate_folder
    from ...system.machine import pick_device

    _refuse_others("eval", verb, TEXT)
    if verb.data is None:
        raise MixerError(f"eval: {verb.dir} holds a model without data of its own; give --data TEXT.")
    device = pick_device(verb.device).type
    found = evaluate_folder(verb.dir, verb.data, window=verb.seq_len, max_bytes=verb.max_bytes, device=device)
    say(json.dumps({"data": str(verb.data), **asdict(found)}) if verb.json else f"{verb.data}: {found.text()}")
    return 0


def sample_host(verb: Any) -> int:
    """Continue a prompt with a host's folder and print both."""
    from ...hosts.surgery.texts import sample_folder
    from ...system.machine import pick_device
    from ..train.config import check_seed

    _refuse_others("sample", verb, SAMPLING)
    check_seed(verb.seed, "sample: seed")
    prompt, text = sample_folder(
        verb.dir,
        tokens=verb.tokens,
        prompt=verb.prompt,
        temperature=0.8 if verb.temperature is None else verb.temperature,
        top_k=verb.top_k,
        top_p=verb.top_p,
        seed=verb.seed,
        device=pick_device(verb.device).type,
    )
    say(json.dumps({"prompt": prompt, "text": text}) if verb.json else prompt + text)
    return 0


def _refuse_others(name: str, verb: DataclassInstance, known: set[str]) -> None:
    """Refuse options that only a run has."""
    if given := given_options(verb, known):
        works = ", ".join(f"--{n.replace('_', '-')}" for n in sorted(known - {"dir"}))
        raise MixerError(f"{name}: {', '.join(given)} is for runs; a host's folder takes {works}.")
