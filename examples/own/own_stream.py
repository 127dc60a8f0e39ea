"""Text that streams through Hugging Face's datasets, here from files; its place is part of each checkpoint."""

import sysconfig
from functools import partial

import torch
from datasets import load_dataset
from torch.nn.functional import cross_entropy

from tokenmix.lab.train import TrainConfig, train
from tokenmix.models import LM, LMConfig

FILES, ROWS, LENGTH = f"{sysconfig.get_paths()['stdlib']}/a*.py", 8, 64


class Bytes:
    def __init__(self):
        self.lines, self.rest = load_dataset("text", data_files=FILES, split="train", streaming=True), b""

    def __iter__(self):
        for line in self.lines:
            self.rest += line["text"].encode() + b"\n"
            while len(self.rest) > ROWS * LENGTH:  # the last byte of a batch is only predicted, then begins the next
                piece, self.rest = torch.tensor([*self.rest[: ROWS * LENGTH + 1]]), self.rest[ROWS * LENGTH :]
                yield piece[:-1].view(ROWS, LENGTH), piece[1:].view(ROWS, LENGTH)

    def state_dict(self):
        return {"lines": self.lines.state_dict(), "rest": [*self.rest]}

    def load_state_dict(self, state):
        self.lines.load_state_dict(state["lines"])
        self.rest = bytes(state["rest"])


if __name__ == "__main__":
    config = LMConfig(dim=32, layers=2, max_len=LENGTH, mixers=({"name": "aft_simple"},))
    loop = TrainConfig(steps=100, eval_every=50, save_every=10, threads=1)
    model, loss = partial(LM, config), lambda logits, y: cross_entropy(logits.flatten(0, 1), y.flatten())
    print(train(loop, "runs/own_stream", resume=True, model=model, batches=Bytes(), loss=loss))
