"""Checkpoints of sharded weights: each rank writes its part, through torch's safetensors writer.

checkpoints/step_00000100/
    model/, optimizer/  shard-00001-model-00001-of-00001.safetensors and so on, one file of each rank
    rng.safetensors   progress.json   manifest.json     as in ``checkpoint``, written by the first rank
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from torch import Tensor, nn

from ...errors import MixerError
from ...system.checkpoint import entry_of, finish, step_name
from ...system.files import sync_dir, write_file
from ...system.read_shards import Like
from ...types import Record
from .world import World


def of_parameters(model: nn.Module) -> Like:
    """Return which parameter a tensor of an optimiser's state is placed like."""
    parameters = dict(model.named_parameters())
    return lambda name: parameters[name.rsplit("|", 1)[0]]


def save_shards(folder: Path, step: int, groups: dict[str, dict[str, Tensor]], progress: Record, world: World) -> None:
    """Write the checkpoint of ``step`` on all ranks, completely or not at all; each file is read again first.

    Args:
        groups: tensors by name, for each stem; those of ``rng`` are the same on every rank.
        progress: counters of the run, as JSON.

    Raises:
        OSError: on every rank, if the disk of one is full or cannot be written to. The temporary directory is then
            removed, and older checkpoints are untouched.
    """
    temporary = folder / f".tmp-{step_name(step)}"
    shared = {stem: group for stem, group in groups.items() if stem != "rng"}
    if world.first:
        shutil.rmtree(temporary, ignore_errors=True)
        for stem in shared:
            (temporary / stem).mkdir(parents=True)
    world.wait()
    try:
        for stem, group in shared.items():
            _write(temporary / stem, group)
        files = {
            name: entry
            for each in world.all_gather_text(json.dumps(_open_written(temporary, world)))
            for name, entry in json.loads(each).items()
        }
        if world.first:
            files |= _write_common(temporary, groups["rng"], progress)
            finish(folder, step, files)
        world.wait()
    except BaseException:
        if world.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write each rank's parts of some tensors."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    odd = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd:  # torch would write it, and nobody could read the file
        raise MixerError(
            f"{folder.name}: checkpoints hold tensors only, got {type(tensors[odd[0]]).__name__} {odd[0]!r}."
        )
    try:
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as why:
        rank, (error, _) = next(iter(why.failures.items()))
        raise OSError(
            getattr(error, "errno", None), f"rank {rank}: {getattr(error, 'strerror', None) or error}"
        ) from None


def _open_written(temporary: Path, world: World) -> Record:
    """Open this rank's share of the files that were written, and return what the manifest says of them."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    found = {}
    for path in sorted(temporary.glob("*/*"))[world.rank :: world.ranks]:
        content = path.read_bytes()
        with contextlib.suppress(OSError):
            sync_dir(path.parent)
        try:
            load(content)
        except SafetensorError as why:
            raise MixerError(f"{path} was written and cannot be read ({why}).") from None
        found[str(path.relative_to(temporary))] = entry_of(content)
    return found


def _write_common(temporary: Path, rng: dict[str, Tensor], progress: Record) -> Record:
    """Write the files of the first rank."""
    from safetensors.torch import save

    contents = {"rng.safetensors": save(rng), "progress.json": json.dumps(progress, indent=1).encode()}
    for name, content in contents.items():
        write_file(temporary / name, content)
    return {name: entry_of(content) for name, content in contents.items()}
