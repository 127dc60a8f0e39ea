"""A logger of your own: every line of metrics goes into a database."""

import sqlite3

import torch.nn.functional as F
from own_data import VALID, batch, model

from tokenmix.lab.train import TrainConfig, train


def to_database(line):
    """A line is a dictionary: kind ("train" or "eval"), step, and numbers."""
    with sqlite3.connect("metrics.db") as database:
        database.execute("create table if not exists metrics (step integer, name text, value real)")
        numbers = [(line["step"], name, value) for name, value in line.items() if isinstance(value, (int, float))]
        database.executemany("insert into metrics values (?, ?, ?)", numbers)


if __name__ == "__main__":
    loop, nats = TrainConfig(steps=100, eval_every=50, save_every=10, threads=1), F.cross_entropy
    train(loop, "runs/own_logger", resume=True, model=model, batches=batch, valid=VALID, loss=nats, on_log=to_database)
