"""What each rank computes in tests/test_ranks.py, and how its processes begin and end."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import context_parallel as example
from cases import CASES
from shared_rows import SEGMENTS
from tokenmix import MixerError, build_mixer
from tokenmix.models import LM, LMConfig
from tokenmix.parallel import Ranks, context_parallel, shared_mean, sum_gradients

T = 13
LIMIT = 60
"""Seconds that an exchange may wait. All together may take three times as long, as on a busy machine they do."""
EDGES = {1: (0, T), 2: (0, 5, T), 4: (0, 4, 4, 9, T)}
"""Where shares begin; one of four is empty."""
STARTS = (3, 8)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
OWN = {
    "aft_simple": {},
    "aft_local": {"window": 3, "max_len": 64},
    "hydra": {},
    "linear": {"heads": 2},
    "aft_forget": {},
    "lightconv": {"heads": 2, "kernel_size": 3},
    "attention": {"heads": 2, "positions": {"name": "rotary"}, "bias": {"name": "alibi"}},
    "aft_full": {"max_len": 64, "rank": 4},
}
MIXERS = {name: (name, options) for name, options in OWN.items()} | {c: CASES[c] for c in SEGMENTS if c not in OWN}
"""Every mixer whose sequences ranks can share."""
KINDS = ("plain", "padded", "documents")


def moved(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Move parameters off their start, where some are 0."""
    for p in module.parameters():
        p.data += 0.1 * torch.randn_like(p)
    return module.to(dtype)


def mixer_of(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    row, options = MIXERS[name]
    return moved(build_mixer(row, dim=8, causal=True, **options), dtype)


def model_of(dtype: torch.dtype, *specs: str, max_len: int = 64) -> nn.Module:
    torch.manual_seed(0)
    mixers = tuple({"name": name, **OWN.get(name, {})} for name in specs or ("aft_simple", "aft_local", "aft_forget"))
    return moved(LM(LMConfig(dim=8, layers=len(mixers), vocab=7, mixers=mixers, max_len=max_len)), dtype)


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs x and the weights of the outputs (2, T, 8), and tokens (2, T + 1)."""
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(2, 2, T, 8, generator=generator, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), torch.randint(0, 7, (2, T + 1), generator=generator)


def padding() -> Tensor:
    """One row is padded on the left beyond the first share of two."""
    return torch.arange(T) >= torch.tensor([[1], [7]])


def documents(alike: bool) -> Tensor:
    starts = torch.zeros(2, T, dtype=torch.bool)
    starts[:, list(STARTS)] = True
    if not alike:
        starts[1] = starts[1].roll(3)
    return starts


def gradients(module: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters()]


def mixed(name: str, kind: str, dtype: torch.dtype, ranks: Ranks | None, start: int, stop: int) -> list[Tensor]:
    """The outputs, the gradient of the inputs and those of the parameters of one mixer, on one share or on all."""
    mixer, (x, weight, _) = mixer_of(name, dtype), drawn(dtype)
    mask = padding() if kind == "padded" else torch.ones(2, T, dtype=torch.bool)
    x, weight, mask = x[:, start:stop].clone().requires_grad_(), weight[:, start:stop], mask[:, start:stop]
    if ranks is not None and kind == "documents":
        y = ranks.mix(mixer, x, starts=[s - start for s in STARTS if start <= s < stop])
    elif ranks is not None:
        with context_parallel(mixer):
            y = mixer(x, key_mask=mask if kind == "padded" else None)
    elif kind == "documents":
        y = torch.cat([mixer(part) for part in x.tensor_split(STARTS, 1)], 1)
    else:
        y = mixer(x, key_mask=mask)
    y = y * mask[..., None]
    (y * weight).sum().backward()
    if ranks is not None:
        sum_gradients(mixer)
    return [y.detach(), x.grad, *gradients(mixer)]


def modelled(kind: str, dtype: torch.dtype, shared: bool, start: int, stop: int) -> list[Tensor]:
    """The logits, the loss and the gradients of a hybrid language model."""
    model, tokens = model_of(dtype), drawn(dtype)[2][:, start : stop + 1]
    mask = (padding() if kind == "padded" else torch.ones(2, T, dtype=torch.bool))[:, start:stop]
    given = {"key_mask": mask} if kind == "padded" else {}
    if kind.startswith("documents"):
        given = {"starts": documents("alike" in kind)[:, start:stop]}
    if shared:
        with context_parallel(model):
            logits = model(tokens[:, :-1], **given)
    else:
        logits = model(tokens[:, :-1], **given)
    total = F.cross_entropy(logits[mask], tokens[:, 1:][mask], reduction="sum")
    loss = shared_mean(total, int(mask.sum())) if shared else total / mask.sum()
    loss.backward()
    if shared:
        sum_gradients(model)
    return [(logits * mask[..., None]).detach(), loss.detach(), *gradients(model)]


MODELLED = ("plain", "padded", "documents alike", "documents")


def refused(rank: int) -> dict[str, str]:
    """What this rank is told where one rank, or each, asks for what cannot be."""
    dtype, said = torch.float64, {}
    x, tokens = torch.randn(2, 4, 8, dtype=dtype), torch.zeros(2, 4, dtype=torch.long)

    def told(name: str, model: nn.Module, *args, group=None, **given) -> None:
        try:
            with context_parallel(model, group):
                model(*args, **given)
            said[name] = "nothing"
        except MixerError as error:
            said[name] = str(error)

    simple = mixer_of("aft_simple", dtype)
    told("segments", model_of(dtype, "aft_simple", "memory_compressed"), tokens)
    told("rows", simple, x[: 2 - rank])
    told("rows of tokens", model_of(dtype), tokens[: 2 - rank])
    told("one", simple, x, key_mask=torch.ones(2, 4 + rank, dtype=torch.bool))
    told("symbols", model_of(dtype), tokens + 7 * rank)
    told("long", model_of(dtype, max_len=7), tokens)
    window = mixer_of("aft_local", torch.float32 if rank else dtype)
    told("dtype", window, x.float() if rank else x)
    told("one model", model_of(dtype, "memory_compressed" if rank else "hydra"), tokens)
    told("foreign", nn.Linear(8, 8), x)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    told("mesh", simple, x, group=mesh)
    told("one dimension", simple, x, group=mesh["cp"])
    told("grad", mixer_of("aft_simple", dtype), x)
    return said


def computed(rank: int, ranks: int, work: tuple[str, ...]) -> dict:
    """Everything that tests of one group of processes look at."""
    world, found = Ranks(), {}
    start, stop = EDGES[ranks][rank : rank + 2]
    for dtype in DTYPES:
        for kind in KINDS:
            for name in MIXERS:
                found[name, kind, dtype] = mixed(name, kind, DTYPES[dtype], world, start, stop)
        for kind in MODELLED:
            found["LM", kind, dtype] = modelled(kind, DTYPES[dtype], True, start, stop)
    if "refused" in work:
        found["refused"] = refused(rank)
    if "example" in work:
        found["example"] = example.train(256, 3)
    return found


def process(rank: int, ranks: int, folder: str, work: tuple[str, ...], compute: Callable) -> None:
    """Be one rank. Ends without the destructors of gloo, which now and then abort."""
    code = 1
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=LIMIT))
        torch.save(compute(rank, ranks, work), f"{folder}/{rank}.pt")
        dist.barrier()
        code = 0
    except Exception:
        Path(f"{folder}/{rank}.txt").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def run(folder: Path, ranks: int, *work: str, compute: Callable = computed, limit: float = 3 * LIMIT) -> list[dict]:
    """Start the ranks on this machine alone and return what each computed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    started = mp.spawn(process, (ranks, str(folder), work, compute), nprocs=ranks, join=False)
    until = time.monotonic() + limit
    try:
        while not started.join(timeout=1):
            assert time.monotonic() < until, f"the ranks did not end within {limit} s"
    except mp.ProcessExitedException:
        said = [path.read_text() for path in sorted(folder.glob("*.txt"))]
        raise AssertionError("\n".join(said) or "a rank ended without a word") from None
    finally:
        for each in started.processes:
            if each.is_alive():
                each.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
