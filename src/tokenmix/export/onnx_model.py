"""Run files of ``export_onnx`` in ONNX Runtime, from the state they store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MixerError
from ..types import Record

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

KEY = "tokenmix"


def onnx_session(model: str | bytes, *, threads: int = 1) -> InferenceSession:
    """Open an ``onnxruntime.InferenceSession`` on the CPU for a file or its content."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_onnx(session: InferenceSession, values: tuple[Tensor, ...]) -> list[Tensor]:
    """Return the outputs for inputs in the session's order."""
    names = [end.name for end in session.get_inputs()]
    return [
        torch.from_numpy(a)
        for a in session.run(None, {n: v.detach().contiguous().numpy() for n, v in zip(names, values, strict=True)})
    ]


class OnnxModel:
    """Run a file of ``export_onnx`` in ONNX Runtime, called with torch tensors on the CPU like the original module.

    Attributes:
        about: the JSON of the file's metadata.
    """

    def __init__(self, path: Path | str, *, threads: int = 1):
        try:
            self.session = onnx_session(str(path), threads=threads)
        except Exception as why:  # ONNX Runtime's errors share no base class
            reason = " ".join(str(why).split())[:200]
            raise MixerError(f"OnnxModel: ONNX Runtime cannot load {path} ({reason}).") from why
        about = self.session.get_modelmeta().custom_metadata_map.get(KEY)
        if about is None:
            raise MixerError(f"OnnxModel: {path} was not written by tokenmix.export.onnx; it lacks that metadata.")
        self.about: Record = json.loads(about)

    def __call__(self, *values: Tensor) -> Tensor:
        """Return the output for an input, and a mask where the file takes one."""
        return self._run(values)[0]

    def init_state(self, batch: int) -> list[Tensor]:
        """Return the state before the first token, in the order of the file's inputs."""
        if "state" not in self.about:
            raise MixerError("OnnxModel: this file takes whole inputs and has no state; export it with decode=True.")
        return [_decode_row(row).expand(batch, *row["shape"]).contiguous() for row in self.about["state"].values()]

    def extend(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Map the next tokens and a state to their outputs and the new state."""
        y, *after = self._run((x, *state))
        return y, after

    def shapes(self, *, outputs: bool = False) -> dict[str, str]:
        """Return the type and shape of each input, or output, by name."""
        ends = self.session.get_outputs() if outputs else self.session.get_inputs()
        kinds = {end.name: end.type.removeprefix("tensor(").rstrip(")") for end in ends}
        return {end.name: f"{kinds[end.name]} ({', '.join(str(n) for n in end.shape)})" for end in ends}

    def _run(self, values: tuple[Tensor, ...]) -> list[Tensor]:
        names = [end.name for end in self.session.get_inputs()]
        if len(names) != len(values):
            raise MixerError(f"OnnxModel: takes {', '.join(names)}; got {len(values)} tensors.")
        return run_onnx(self.session, values)


def encode_row(row: Tensor) -> Record:
    """Encode one row of a state as JSON: a single number where all are equal, infinities as words."""
    words = (
        [str(n) for n in row.flatten().tolist()]
        if row.is_floating_point()
        else [int(n) for n in row.flatten().tolist()]
    )
    return {
        "shape": list(row.shape),
        "dtype": str(row.dtype).removeprefix("torch."),
        "values": words[:1] if len(set(words)) == 1 else words,
    }


def _decode_row(row: Record) -> Tensor:
    values = torch.tensor(
        [float(n) if isinstance(n, str) else n for n in row["values"]], dtype=getattr(torch, row["dtype"]), device="cpu"
    )
    return values[0].expand(tuple(row["shape"])) if len(row["values"]) == 1 else values.reshape(row["shape"])


def difference(got: Tensor, want: Tensor) -> float:
    """Return the largest |got - want|, divided by the largest finite |want| where that is above 1.

    Equal infinities count as equal; other shapes or dtypes as infinitely far apart.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    got, want = got.detach(), want.detach()
    apart = torch.where(got == want, 0.0, (got.double() - want.double()).abs()).nan_to_num(float("inf"))
    return (
        float(apart.amax() / max(1.0, float(want.double().nan_to_num(0.0, 0.0, 0.0).abs().amax())))
        if apart.numel()
        else 0.0
    )
