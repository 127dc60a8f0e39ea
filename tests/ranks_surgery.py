"""What each process does with a converted host that is split over two."""

from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tokenmix import MixerError
from tokenmix.hosts import load_converted, save_replaced


def shard(rank: int, folder: str) -> None:
    """Split a loaded model over two processes, compare it with the whole one, and save it whole."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, whole = load_converted(f"{folder}/one"), load_converted(f"{folder}/one")
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.transformer.h:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ids = torch.arange(3, 15).view(2, 6)
    found, wanted = model(ids, labels=ids), whole(ids, labels=ids)
    found.loss.backward()
    wanted.loss.backward()
    torch.testing.assert_close(found.logits, wanted.logits)
    for (name, own), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad.full_tensor(), other.grad, msg=name, rtol=1e-4, atol=1e-5)
    try:
        save_replaced(model, f"{folder}/split")
    except MixerError as why:
        assert re.fullmatch(r".* gather it by [^\n]*get_model_state_dict[^\n]*", str(why)), why  # noqa: PT017  # a process
    else:
        raise AssertionError("a part of a model was saved as if it were whole")
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        model.save_pretrained(f"{folder}/two", state_dict=full)
    dist.barrier()
    dist.destroy_process_group()
