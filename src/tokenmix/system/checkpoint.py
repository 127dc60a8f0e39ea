"""Checkpoints: written completely or not at all, and verified byte for byte before use.

checkpoints/step_00000100/
    model.safetensors   optimizer.safetensors   rng.safetensors   progress.json
    manifest.json       size and sha256 of each of these files, and a sha256 of itself

Where the weights were sharded, model and optimizer are folders with a file of each rank; see ``shards``.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from ..errors import MixerError
from ..types import Record
from .files import sync_dir, write_file
from .read_shards import Like, read_shards, take_share

MANIFEST = "manifest.json"


def check_can_save() -> None:
    """Refuse to start where checkpoints can be neither written nor read.

    A tensor is written to find out, as safetensors needs packages of its own.
    """
    try:
        from safetensors.torch import save

        save({"one": torch.zeros(1)})
    except ImportError as why:
        raise MixerError(f"checkpoints need the extra 'train' ({why}): pip install 'tokenmix[train]'.") from None


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step_{step:08d}"


def list_steps(folder: Path) -> list[int]:
    """List the steps that have a checkpoint, in ascending order, whether intact or not."""
    return sorted(
        int(p.name[5:]) for p in folder.glob("step_*") if p.is_dir() and p.name[5:].isdecimal() and p.name.isascii()
    )


def save_checkpoint(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], progress: Record) -> Path:
    """Write the checkpoint of ``step``: files go into a temporary directory, which is then renamed.

    Args:
        tensors: tensors by name, for each file stem.
        progress: counters of the run, as JSON.

    Raises:
        OSError: if the disk is full or cannot be written to. The temporary directory is then removed, and older
            checkpoints are untouched.
    """
    from safetensors.torch import save

    final, temporary = folder / step_name(step), folder / f".tmp-{step_name(step)}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        files = {}
        for stem, group in tensors.items():
            content = save({k: v.detach().cpu().contiguous() for k, v in group.items()})
            write_file(temporary / f"{stem}.safetensors", content)
            files[f"{stem}.safetensors"] = entry_of(content)
        content = json.dumps(progress, indent=1).encode()
        write_file(temporary / "progress.json", content)
        files["progress.json"] = entry_of(content)
        finish(folder, step, files)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def finish(folder: Path, step: int, files: dict[str, Record]) -> None:
    """Write the manifest of a temporary directory that is complete, and give it its name."""
    final, temporary = folder / step_name(step), folder / f".tmp-{step_name(step)}"
    write_file(temporary / MANIFEST, manifest_of(step, files))
    sync_dir(temporary)
    remove_checkpoint(folder, step)
    os.rename(temporary, final)
    sync_dir(folder)


def remove_checkpoint(folder: Path, step: int) -> None:
    """Delete a checkpoint. It is renamed first, so that a kill half-way leaves no broken checkpoint behind."""
    path, doomed = folder / step_name(step), folder / f".old-{step_name(step)}"
    if path.exists():
        shutil.rmtree(doomed, ignore_errors=True)
        try:
            os.rename(path, doomed)
        except OSError as why:  # a folder of a lower layer of an overlay cannot be renamed
            if why.errno != errno.EXDEV:
                raise
            doomed = path
        shutil.rmtree(doomed, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Delete the unfinished directories of a killed process."""
    for pattern in (".tmp-*", ".old-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int, best: int | None) -> None:
    """Delete all checkpoints but the latest ``keep`` and the best one."""
    for step in list_steps(folder)[:-keep]:
        if step != best:
            remove_checkpoint(folder, step)


def find_fault(path: Path) -> str | None:
    """Describe what is wrong with the checkpoint at ``path``, naming the file; None if every byte is as written."""
    manifest = path / MANIFEST
    if not manifest.is_file():  # a pipe would never answer
        return f"{manifest} is missing"
    try:
        content = json.loads(manifest.read_text())
        files = content["files"]
        if manifest.read_bytes() != manifest_of(content["step"], files) or path.name != step_name(content["step"]):
            return f"{manifest} was edited"
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{manifest} is truncated or edited"
    for name, entry in files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        size = file.stat().st_size
        if size != entry["bytes"]:
            return f"{file} is truncated or edited: {size} bytes instead of {entry['bytes']}"
        if hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
            return f"{file} was edited: its sha256 does not match the manifest"
    return None


def previous_good(folder: Path, step: int) -> int | None:
    """Return the latest intact checkpoint before ``step``."""
    return next(
        (s for s in reversed(list_steps(folder)) if s < step and find_fault(folder / step_name(s)) is None), None
    )


def load_checkpoint(
    folder: Path, step: int, *stems: str, like: dict[str, Like] | None = None
) -> tuple[dict[str, dict[str, Tensor]], Record]:
    """Verify the checkpoint of ``step``, then read the named groups of tensors and the run's counters.

    Args:
        like: of some groups, which tensor to place each one like, by its name; the others are read whole.

    Raises:
        MixerError: if a file is missing or damaged; the message names it, and the previous intact checkpoint if there
            is one.
    """
    check_can_save()
    path = folder / step_name(step)
    if not path.is_dir():
        known = list_steps(folder)
        raise MixerError(
            f"{folder} has no checkpoint of step {step}; available: {', '.join(map(str, known)) or 'none'}."
        )
    broken = find_fault(path)
    if broken is not None:
        good = previous_good(folder, step)
        offer = f"the latest intact one before it is step {good}: resume with --from {good}"
        offer = offer if good is not None else "no earlier checkpoint is intact; start again in a new directory"
        raise MixerError(f"checkpoint not loaded: {broken}; {offer}.")
    tensors = {stem: read_group(path / stem, (like or {}).get(stem)) for stem in stems}
    return tensors, json.loads((path / "progress.json").read_text())


def read_group(stem: Path, like: Like | None = None) -> dict[str, Tensor]:
    """Read one group of tensors, written by one process (a file) or by many (a folder)."""
    from safetensors.torch import load

    if stem.is_dir():
        return read_shards(stem, like)
    found = load(stem.with_name(f"{stem.name}.safetensors").read_bytes())
    return found if like is None else {name: take_share(tensor, like(name)) for name, tensor in found.items()}


def entry_of(content: bytes) -> Record:
    """Return the entry of a file in a manifest."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def manifest_of(step: int, files: dict[str, Record]) -> bytes:
    """Return the manifest of a checkpoint, which holds a hash of itself."""
    body = json.dumps({"step": step, "files": files}, sort_keys=True)
    return json.dumps(
        {"step": step, "files": files, "sha256": hashlib.sha256(body.encode()).hexdigest()}, sort_keys=True, indent=1
    ).encode()
