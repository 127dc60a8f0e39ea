"""The group of processes that train one model together, seen from this process."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import MixerError
from ...models import LM, Block
from ...parallel import context_parallel, shared_moments, sum_gradients
from ...parallel.moments import batch_norms
from ...system.config import dotted_fields
from ...system.machine import pick_device
from ..data.sampler import MASK, mix64
from .config import RunConfig
from .task import Inputs, Task, map_inputs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


REACHING = timedelta(seconds=16)
"""Timeout of one attempt to reach the rendezvous address; torch makes up to three."""
JOINING = timedelta(seconds=40)
"""How long a rank waits there for the others."""
PATIENCE = timedelta(minutes=10)
"""Timeout of later exchanges; the death of a process on the same machine is noticed at once."""
PARTING = timedelta(seconds=10)
"""How long a failed rank waits for the errors of the others."""
BACKENDS = "cpu:gloo,cuda:nccl"
"""What carries the tensors of each device, where there are GPUs."""


class World:
    """A process that trains alone. ``Joined`` overrides everything that needs communication.

    Attributes:
        rank: which of the processes this is; the first one, 0, writes the run directory.
        ranks: their number.
        sharded: whether each rank holds a part of the weights.
    """

    rank, ranks, sharded = 0, 1, False

    @property
    def first(self) -> bool:
        """Return whether this process writes the run directory."""
        return self.rank == 0

    def pick_device(self, name: str) -> torch.device:
        """Return this process's device of a name, as ``train.device`` gives it."""
        return pick_device(name)

    def check(self, config: RunConfig, task: Task, model: nn.Module) -> None:
        """Raise an error if these processes cannot share this run."""
        cp = config.train.context_parallel
        if cp > 1:
            raise MixerError(
                f"train: train.context_parallel={cp} does not divide 1 process; start {cp} with torchrun, "
                "or set --train.context-parallel 1."
            )

    def spread(self, model: nn.Module) -> None:
        """Give all ranks the weights of the first, or a shard of them each, if the config asks for it."""

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        """Return ``model`` compiled, or itself with its blocks compiled where their weights are sharded."""
        return torch.compile(model)

    def join(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Return a context in which the batch norms of ``model`` see the rows of all ranks."""
        return contextlib.nullcontext()

    def hold_gradients(self, model: nn.Module, hold: bool) -> None:
        """Say whether the next backward pass leaves gradients to be summed after a later one."""

    def gather_in(self, model: nn.Module) -> None:
        """Free the weights of other ranks that an evaluation gathered."""

    def share(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        """Return this rank's share of a batch."""
        return inputs, targets

    def reading_share(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        """Return a context in which ``model`` reads this rank's share of each sequence."""
        return contextlib.nullcontext()

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of each of some numbers over all ranks, the same on each."""
        return numbers

    def sum_gradients(self, model: nn.Module) -> None:
        """Sum every gradient over all ranks."""

    def broadcast(self, number: float) -> float:
        """Broadcast a number from the first rank."""
        return number

    def all_reduce_max(self, number: int) -> int:
        """Return the maximum of a number over all ranks."""
        return number

    def all_gather_text(self, text: str) -> list[str]:
        """All-gather a text; return one for each rank."""
        return [text]

    def wait(self) -> None:
        """Wait until all ranks reach this point."""

    def begin(self, model: nn.Module, seed: int, step: int) -> None:
        """Begin a step: seed its random numbers, if the layout forbids continuing those of the step before."""


class Joined(World):
    """One of several processes with one model: rank = (data-parallel rank, context-parallel rank), rows of a batch are
    split over the first and tokens over the second.
    """

    def __init__(self, config: RunConfig):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.cp = config.train.context_parallel
        if self.ranks % self.cp:
            raise MixerError(
                f"train: train.context_parallel={self.cp} does not divide {self.ranks} processes; start a multiple of "
                f"{self.cp}, or set --train.context-parallel to a divisor of {self.ranks}."
            )
        self.dp, self.sharded = self.ranks // self.cp, config.train.shard == "fsdp"
        self._buffers: dict[str, Tensor] | None = None  # those before the first step
        self.mesh: DeviceMesh | None = None
        self.every: DeviceMesh | None = None

    def pick_device(self, name: str) -> torch.device:
        device = own_device(name, int(os.environ.get("LOCAL_RANK", self.rank)))
        carried = dict(each.split(":") for each in dist.get_backend_config().split(","))
        if "cpu" not in carried or (device.type == "cuda" and carried.get("cuda") != "nccl"):
            _refuse(self, f"were joined by {dist.get_backend()}; call init_process_group({BACKENDS!r})")
        if device.type not in ("cpu", "cuda"):
            _refuse(self, f"compute on CPUs or on CUDA GPUs, got device={device.type!r}; set --train.device cpu")
        check_devices(self, self.all_gather_text(_name_of(device)))
        if self.cp > 1:
            self.mesh = _mesh(device, (self.dp, self.cp), ("dp", "cp"))
        if self.sharded:
            self.every = _mesh(device, (self.ranks,), ("all",))
        return device

    def check(self, config: RunConfig, task: Task, model: nn.Module) -> None:
        train = config.train
        rows = train.batch_size // train.accumulate
        _check_alike(self, config, task)
        if rows < self.dp:
            _refuse(
                self, f"need a row each, got {rows} rows (train.batch_size / train.accumulate) for {self.dp} of them"
            )
        if self.sharded:
            _check_sharded(self, config, model)
        if self.cp > 1:
            _check_tokens(self, config, task, model)

    def spread(self, model: nn.Module) -> None:
        with torch.no_grad():
            for tensor in (each for each in [*model.parameters(), *model.buffers()] if each.numel()):
                sent = tensor.detach().reshape(-1).clone()
                dist.broadcast(sent.view(torch.uint8), 0)
                tensor.copy_(sent.view_as(tensor))
        if not self.sharded:
            return
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        for module in [*_blocks(model), model]:
            part: Any = fully_shard(module, mesh=self.every)
            part.set_gradient_divide_factor(1.0)  # sums: the loss of each rank is its part of the mean
            part.set_force_sum_reduction_for_comms(True)  # gloo has no product of sums
            register_fsdp_forward_method(module, "extend")

    def compile(self, model: nn.Module) -> Callable[..., Any]:
        if not self.sharded:
            return torch.compile(model)
        for block in _blocks(model):  # what gathers its weights stays outside
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]  # as torch calls it
        return model

    def join(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        return shared_moments(model)

    def hold_gradients(self, model: nn.Module, hold: bool) -> None:
        if self.sharded:
            sharded: Any = model
            sharded.set_requires_gradient_sync(not hold)
            sharded.set_is_last_backward(not hold)

    def gather_in(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import FSDPModule

        for each in model.modules() if self.sharded else ():
            if isinstance(each, FSDPModule):
                each.reshard()

    def share(self, inputs: Inputs, targets: Tensor) -> tuple[Inputs, Tensor]:
        return map_inputs(self._part, inputs), self._part(targets)

    def _part(self, batch: Tensor) -> Tensor:
        rows = batch.tensor_split(self.dp)[self.rank // self.cp]
        return rows.tensor_split(self.cp, 1)[self.rank % self.cp] if self.cp > 1 else rows

    def reading_share(self, model: nn.Module) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.mesh is None else context_parallel(model, self.mesh["cp"])

    def total(self, numbers: Tensor) -> Tensor:
        summed = numbers.double().clone()
        dist.all_reduce(summed)
        return summed

    def sum_gradients(self, model: nn.Module) -> None:
        if self._buffers:
            changed = [name for name, b in model.named_buffers() if not torch.equal(b, self._buffers.get(name, b))]
            if changed:
                _refuse(self, f"cannot train what learns beside its gradient, got {changed[0]}; start one process")
        self._buffers = {}
        if not self.sharded:
            sum_gradients(model)

    def broadcast(self, number: float) -> float:
        found = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(found, 0)
        return found.item()

    def all_reduce_max(self, number: int) -> int:
        found = torch.tensor([number])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    def all_gather_text(self, text: str) -> list[str]:
        mine = text.encode()
        longest = self.all_reduce_max(len(mine))
        every = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.ranks)]
        dist.all_gather(every, torch.tensor([*mine.ljust(longest)], dtype=torch.uint8))
        return [bytes(each.tolist()).decode().rstrip() for each in every]

    def wait(self) -> None:
        dist.barrier()

    def begin(self, model: nn.Module, seed: int, step: int) -> None:
        if self._buffers is None:
            kept = model.state_dict().keys() - {
                f"{m}.{n}" for m, norm in batch_norms(model).items() for n, _ in norm.named_buffers()
            }
            self._buffers = {name: b.clone() for name, b in model.named_buffers() if name in kept}
        torch.manual_seed(mix64(mix64(mix64(seed & MASK) + step) + self.rank) >> 1)


def _refuse(world: Joined, what: str) -> None:
    raise MixerError(f"train: {world.ranks} processes {what}.")


def own_device(name: str, number: int) -> torch.device:
    """Return the device of a process by its number on this machine: for "cuda" and "auto" a GPU, if there are any."""
    if name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{number % torch.cuda.device_count()}"
    device = pick_device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _name_of(device: torch.device) -> str:
    """Return a name of a device that no other has, but for CPUs."""
    return f"cuda {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type


def check_devices(world: Joined, every: list[str]) -> None:
    """Refuse ranks on different kinds of devices, and several on one GPU; ``every`` names that of each rank."""
    kinds = [each.split()[0] for each in every]
    if len(set(kinds)) > 1:
        _refuse(world, f"compute on one kind of device, got {', '.join(kinds)}; set --train.device cpu")
    shared = next((i for i, each in enumerate(every) if kinds[i] == "cuda" and each in every[:i]), None)
    if shared is not None:
        first = every.index(every[shared])
        _refuse(
            world, f"need a GPU each, got one for ranks {first} and {shared}; start fewer, or set --train.device cpu"
        )


def _check_alike(world: Joined, config: RunConfig, task: Task) -> None:
    """Refuse ranks that were given different configs or parts, whose shares would not be of one batch."""
    free = {f"data.{name}" for name in task.movable} | {"train.device"}
    mine = {name: value for name, value in dotted_fields(config.to_json()).items() if name not in free}
    every = [json.loads(each) for each in world.all_gather_text(json.dumps(mine))]
    for rank, other in enumerate(every):
        unlike = [name for name in {**every[0], **other} if every[0].get(name) != other.get(name)]
        if unlike:
            _refuse(world, f"need one config, got another {unlike[0]} on rank {rank} than on rank 0")


def _blocks(model: nn.Module) -> list[Block]:
    return [each for each in model.modules() if isinstance(each, Block)]


def _check_sharded(world: Joined, config: RunConfig, model: nn.Module) -> None:
    if not isinstance(model, LM):
        _refuse(world, f"shard language models (LM), got {type(model).__name__}; set --train.shard none")
    if "optimizer" in config.own:
        _refuse(world, "do not shard the state of an optimizer= of one's own; set --train.shard none")
    if config.optim.one_hot:
        _refuse(world, "have no optim.one_hot where weights are sharded; set --train.shard none")
    single = [name for name, p in model.named_parameters() if p.ndim == 0]
    if single:
        _refuse(world, f"cannot shard a parameter that is one number ({single[0]}); set --train.shard none")


def _check_tokens(world: Joined, config: RunConfig, task: Task, model: nn.Module) -> None:
    cp = world.cp
    if not task.shares_tokens:
        _refuse(
            world, f"share the tokens of text only, got data of kind {config.data.kind!r}; set context_parallel to 1"
        )
    if config.train.compile:
        _refuse(world, "do not compile what shares tokens; set --train.compile false")
    if batch_norms(model):
        _refuse(
            world, f"share no tokens of batch norms, got {next(iter(batch_norms(model)))}; set context_parallel to 1"
        )
    length = config.data.seq_len  # type: ignore[attr-defined]  # text has a length
    if length < cp:
        _refuse(world, f"need a token each, got data.seq_len={length} for {cp} of them")
    if getattr(config.model, "sample_positions", None) is not None:
        _refuse(world, "cannot sample positions of a share; set context_parallel to 1")
    with world.reading_share(model):  # refuses mixers whose sequences cannot be shared
        pass


def _mesh(device: torch.device, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device.type, shape, mesh_dim_names=names)


def was_restarted() -> bool:
    """Return whether torchrun has started this process again after one of its group was lost."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextlib.contextmanager
def join_ranks(who: str) -> Iterator[Callable[[RunConfig], World]]:
    """Join the processes that torchrun started; within this block an error of one ends all, each with one line.

    Where the surrounding program has initialised torch.distributed, its processes are used, and stay joined.

    Yields:
        A function (config) that returns the ``World``.

    Raises:
        MixerError: if the others cannot be reached, or one of them ended.
    """
    if dist.is_available() and dist.is_initialized():
        yield lambda config: Joined(config) if dist.get_world_size() > 1 else World()
        return
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 2:
        yield lambda config: World()
        return
    store = _rendezvous(who, given)
    try:
        yield Joined
    except BaseException as why:
        lost = _is_peer_lost(why)
        if not lost:
            _note(store, f"rank {dist.get_rank()} stopped: {_line(why)}")
        rank = dist.get_rank()
        with contextlib.suppress(Exception):
            dist.destroy_process_group()  # which the others notice at their next exchange
        if lost:
            raise MixerError(f"{who}: {_first_failure(store, rank) or _without_word(why)}") from None
        _part(store, int(given))
        raise
    dist.barrier()
    dist.destroy_process_group()


def _rendezvous(who: str, ranks: str) -> dist.Store:
    """Meet the other processes where the environment says; return the store that all of them can write to."""
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=REACHING))
        store.set_timeout(JOINING)
        # torchrun keeps its store when it starts the processes again, with the addresses of those that are gone
        store = dist.PrefixStore(f"tokenmix/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
        backends = BACKENDS if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(
            backends, store=dist.PrefixStore("gloo", store), rank=rank, world_size=size, timeout=PATIENCE
        )
        return store
    except (ValueError, RuntimeError) as why:  # what torch raises where a variable is missing, and where nobody answers
        raise MixerError(
            f"{who}: this is one of {ranks} processes (WORLD_SIZE={ranks}), which did not meet "
            f"({_line(why)[:200]}); start them with torchrun."
        ) from None


def _is_peer_lost(why: BaseException) -> bool:
    """Return whether an error says that another process is gone."""
    said = str(why).lower()
    return isinstance(why, dist.DistError) or (isinstance(why, RuntimeError) and ("gloo" in said or "nccl" in said))


def _line(why: BaseException) -> str:
    return " ".join(str(why).split()) or type(why).__name__


def _without_word(why: BaseException) -> str:
    return "another process ended without a word; `tokenmix resume` continues the run from its last checkpoint."


def _note(store: dist.Store, text: str) -> None:
    """Tell the others why this rank ends, unless one of them was first."""
    with contextlib.suppress(Exception):
        store.compare_set("failed", "", text)


def _first_failure(store: dist.Store, rank: int) -> str:
    """Return what the first rank to fail said, "" if none did."""
    with contextlib.suppress(Exception):
        store.add("parted", 1)
        if store.check(["failed"]):
            return str(store.get("failed").decode())
    return ""


def _part(store: dist.Store, ranks: int) -> None:
    """Wait until every rank knows why all end, so that torchrun stops none before it has said so."""
    until = time.monotonic() + PARTING.total_seconds()
    with contextlib.suppress(Exception):
        store.add("parted", 1)
        while store.add("parted", 0) < ranks and time.monotonic() < until:
            time.sleep(0.05)
