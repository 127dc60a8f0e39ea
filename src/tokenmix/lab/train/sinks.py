"""Further outputs of a run's metrics: metrics.csv and TensorBoard. metrics.jsonl is authoritative."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from ...errors import MixerError
from ...types import Record
from ..data.metrics_csv import append_csv, flatten_metrics, write_csv
from .config import TrainConfig
from .rundir import RunDir

EVENTS = "events.out.tfevents."
NO_SCALARS = ("kind", "split", "phase", "step", "image_size")


class Sink(Protocol):
    """An output of a run's metrics, which must not change the run's numbers."""

    def add(self, line: Record) -> None:
        """Take a line that has just been added to metrics.jsonl."""

    def add_samples(self, step: int) -> None:
        """Take the samples of a step."""

    def close(self) -> None:
        """Write what is left."""


def check_sinks(config: TrainConfig) -> None:
    """Refuse to start where TensorBoard is asked for and cannot be written."""
    if config.tensorboard:
        try:
            import torch.utils.tensorboard  # noqa: F401  (fails where the package tensorboard is missing)
        except ImportError as why:
            raise MixerError(
                f"train.tensorboard needs the extra 'tensorboard' ({why}): pip install 'tokenmix[tensorboard]'."
            ) from None


@contextlib.contextmanager
def open_sinks(run: RunDir, config: TrainConfig, step: int) -> Iterator[list[Sink]]:
    """Open the sinks of a run that goes on after ``step``, to which its metrics have been cut back."""
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if config.csv:
            sinks.append(CSV(run))
        elif run.csv.exists():  # of an earlier part of the run, and possibly of steps that come again
            write_csv(run.csv, run.read_metrics())
        if config.tensorboard:
            sinks.append(TensorBoard(run, step))
        for sink in sinks:
            stack.callback(_close, sink)
        yield sinks


def _close(sink: Sink) -> None:
    """Close a sink; a full disk must not hide the error that ended the run."""
    with contextlib.suppress(OSError):
        sink.close()


class CSV:
    """Keep metrics.csv equal to metrics.jsonl."""

    def __init__(self, run: RunDir):
        self.run = run
        write_csv(run.csv, run.read_metrics())

    def add(self, line: Record) -> None:
        append_csv(self.run.csv, self.run.metrics, line)

    def add_samples(self, step: int) -> None:
        pass

    def close(self) -> None:
        write_csv(self.run.csv, self.run.read_metrics())


class TensorBoard:
    """Write scalars and samples to RUN/tensorboard.

    A run that goes on marks the steps after its checkpoint as gone. A run that had no such folder so far gets its
    history first.
    """

    def __init__(self, run: RunDir, step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.run, self.folder = run, run.path / "tensorboard"
        begun = any(self.folder.glob(EVENTS + "*"))
        wait_for_later_name(self.folder)
        with self._name_folder():
            self.writer: Any = SummaryWriter(str(self.folder), purge_step=step + 1 if begun else None)
            for line in [] if begun else run.read_metrics():
                self._scalars(line)
            self.writer.flush()

    def add(self, line: Record) -> None:
        with self._name_folder():
            self._scalars(line)
            self.writer.flush()  # what is not flushed is lost to a kill

    def add_samples(self, step: int) -> None:
        with self._name_folder():
            for file in sorted(self.run.samples.glob(f"step_{step:08d}.*")):
                if file.suffix == ".png":
                    self.writer.file_writer.add_summary(_image(file), step)
                else:
                    text = file.read_bytes().decode("utf-8", "backslashreplace")
                    self.writer.add_text("sample", "".join(f"    {row}\n" for row in text.split("\n")), step)
            self.writer.flush()

    def close(self) -> None:
        with self._name_folder():
            self.writer.close()

    def _scalars(self, line: Record) -> None:
        group = line["split"] if line["kind"] == "eval" else line["kind"]
        for name, value in flatten_metrics(line).items():
            if name not in NO_SCALARS:
                self.writer.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, line["step"])

    @contextlib.contextmanager
    def _name_folder(self) -> Iterator[None]:
        """Give errors of the disk the name of the folder, which those of the writing thread lack."""
        try:
            yield
        except OSError as why:
            raise OSError(why.errno, why.strerror, str(self.folder)) from why


def wait_for_later_name(folder: Path) -> None:
    """Wait until a new file would have a later second in its name than those of a folder.

    TensorBoard reads them in the order of their names, which begin with the second and go on with the process.
    """
    seconds = [p.name.removeprefix(EVENTS).split(".")[0] for p in folder.glob(EVENTS + "*")]
    newest = max((int(s) for s in seconds if s.isdigit()), default=0)
    while newest <= time.time() < newest + 1:
        time.sleep(0.02)


def _image(png: Path) -> object:
    """Return a PNG as TensorBoard stores it."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    content = png.read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    return Summary(value=[Summary.Value(tag="sample", image=image)])
