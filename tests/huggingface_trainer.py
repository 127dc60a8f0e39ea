"""Run transformers' Trainer briefly on one of our models.

``huggingface_trainer.py OUT``, alone or in each process of torchrun.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from huggingface_checks import config
from tokenmix.hosts.huggingface import TokenMixForCausalLM  # before transformers: it repairs torchvision

STEPS, BATCH = 6, 4


def rows() -> list[dict[str, torch.Tensor]]:
    """Texts of very different lengths, padded on the right, so that processes see different numbers of labels."""
    draw, found = torch.Generator().manual_seed(3), []
    for i in range(16):
        x = torch.randint(1, 40, (12,), generator=draw)
        mask = torch.arange(12) < (3 if i % 3 else 12)
        found.append({"input_ids": x * mask, "attention_mask": mask.long(), "labels": torch.where(mask, x, -100)})
    return found


def trainer(out: Path, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    model = TokenMixForCausalLM(config("hybrid", initializer_range=0.2))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    given: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // world,
        "learning_rate": 0.1,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    given |= {
        "save_steps": 3,
        "logging_steps": 100,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
        "seed": 1,
    }
    given |= {"ddp_backend": "gloo"} if world > 1 else {}
    return Trainer(model, TrainingArguments(str(out), **{**given, **options}), train_dataset=rows())


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = Path(sys.argv[1])
    run = trainer(place, save_strategy="no")
    run.train()
    if int(os.environ.get("RANK", "0")) == 0:
        torch.save(
            {name: p.detach() for name, p in run.accelerator.unwrap_model(run.model).named_parameters()},
            place / "weights.pt",
        )
    # gloo's threads sometimes still run when Python tears the process down, which then ends in abort(): one run of ten,
    # with destroy_process_group as without, since DDP keeps the group. All that is tested is on the disk by now.
    sys.stdout.flush()
    os._exit(0)
