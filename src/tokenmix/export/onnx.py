"""Export mixers and models with torch.export and as ONNX files, including the decode step with its state.

An ONNX file is written only after ONNX Runtime matches torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import MixerError
from ..kernels.backend import lower_operators
from ..models import evaluation_mode
from ..system.files import temporary_path
from ..system.version import __version__
from ..types import Record
from .dynamic_shapes import Sizes, input_shapes, programs, short_length, varying_axes
from .inputs import Port, find_port, narrow_port, own_port, silence_exporters
from .onnx_model import KEY, OnnxModel, difference, encode_row

OLDEST_OPSET = 18
TOLERANCE = 1e-4
MOST = 2**31 - 2**20
NUMBERS = 2**25
"""Numbers of an output beyond which the comparison takes two rows instead of five or more."""


@dataclass(frozen=True)
class OnnxReport:
    """Describe a written file: inputs, outputs and sizes.

    ``difference`` is the largest difference from torch over the ``compared`` numbers.
    """

    path: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    sizes: Sizes
    difference: float
    compared: int
    nodes: int
    bytes: int

    def to_json(self) -> Record:
        """Return JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.sizes.length
        batch = "any batch" if self.sizes.batch is None else f"batch {self.sizes.batch}"
        if high == low:
            length = f", length {low}"
        else:
            length = f", length {low} to {high}" if high else f", any length from {low}"
        size = f"{self.nodes} nodes, {self.bytes / 1e6:.1f} MB"
        lines = [f"{self.path}: {size}, {batch}{length if high != 0 else ''}"]
        lines += [f"  in   {name}  {shape}" for name, shape in self.inputs.items()]
        lines += [f"  out  {name}  {shape}" for name, shape in self.outputs.items()]
        if self.sizes.padded:
            lines.append(f"  shorter inputs are padded: each costs as much as one of length {high}")
        compared = f"ONNX Runtime and torch differ by at most {self.difference:.1e} over {self.compared:,} numbers"
        return "\n".join([*lines, f"  {compared}"])


def export_program(
    model: nn.Module,
    *,
    decode: bool = False,
    length: int | None = None,
    fixed: bool = False,
    key_mask: bool = False,
    chunk: int = 1,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
) -> torch.export.ExportedProgram:
    """Export a mixer or a model as a ``torch.export.ExportedProgram`` of standard operators.

    The model is one of tokenmix, or a host whose attention ``replace_mixers`` replaced; a host's mask is its
    ``attention_mask``.

    Batch and length are free where the mixer allows it. Call the program as ``program.module()(x)``, with
    ``key_mask`` as ``(x, mask)``; with ``decode`` as ``(x, state)``, which returns the outputs and the new state.

    Args:
        decode: export the step that reads the next ``chunk`` tokens with a state, instead of the whole input.
        length: the longest input to accept; default max_len, or 256 without one. Where the mixer's steps depend on
            the length, shorter inputs are padded to it and cost as much (``Sizes.padded``).
        fixed: accept that length alone, which is also the fastest to trace.
        key_mask: take a mask (B, T) beside the input.
        grid, prefix: the fixed grid arguments of a mixer.

    Raises:
        MixerError: if a mixer declares no export, or torch cannot trace it.
    """
    port = find_port(model, decode=decode, key_mask=key_mask, chunk=chunk, grid=grid, prefix=prefix)
    with evaluation_mode(model):
        return next(programs(port, length, fixed))[0]


def export_onnx(
    model: nn.Module,
    path: Path | str,
    *,
    decode: bool = False,
    length: int | None = None,
    fixed: bool = False,
    key_mask: bool = False,
    chunk: int = 1,
    grid: tuple[int, ...] | None = None,
    prefix: int = 0,
    inputs: Callable[[int, int], object] | None = None,
    opset: int | None = None,
    tolerance: float = TOLERANCE,
    wide_state: bool = False,
    operators: Literal["primitive", "standard"] = "primitive",
) -> OnnxReport:
    """Write ``export_program`` as an ONNX file.

    Before the file gets its name, ONNX Runtime runs it and its outputs are compared with torch's on other inputs and
    sizes. The tensors of a state are named inputs (``state.keys``, ``state.layers.0.keys``) and outputs
    (``new_state. ..``). The file's metadata, under the key "tokenmix", is JSON: version, config, sizes, and the state
    before the first token, which ``OnnxModel.init_state`` reads.

    Args:
        inputs: for any other module: (length, batch) -> what it is called with, a tensor, a tuple or a dict, whose
            tensors become the file's inputs; ``length`` is then needed.
        opset: version of the ONNX operators, 18 or above; default the exporter's.
        wide_state: keep the tensors of a state that torch keeps in float64 so in the file; False: in float32 between
            steps.
        operators: "primitive", or "standard": write gated linear recurrences as ONNX's LinearAttention, which serves
            any length, in opset 27; ``opset`` must then be None.
        tolerance: the largest difference accepted, relative to the largest number of an output where that is above 1.

    Raises:
        MixerError: as ``export_program``; if a package is missing; if the numbers differ, and then no file is written.
    """
    standard = _check_operators(operators, opset)
    _check_onnx(opset)
    path = Path(path)
    if inputs is None:
        port = find_port(model, decode=decode, key_mask=key_mask, chunk=chunk, grid=grid, prefix=prefix)
    elif length is None or decode or key_mask or grid is not None:
        raise MixerError("export_onnx: inputs= needs length=, and takes no decode, key_mask or grid.")
    else:
        port, length = own_port(model, inputs, length if fixed else None), None if fixed else length
    if port.decodes and not wide_state:
        port = narrow_port(port)
    if path.exists() or not path.parent.is_dir():
        problem = "exists already; give another path" if path.exists() else "lies in a folder that does not exist"
        raise MixerError(f"export_onnx: {path} {problem}.")
    if sum(p.numel() * p.element_size() for p in model.parameters()) > MOST:
        raise MixerError("export_onnx: an ONNX file holds at most 2 GB, and these weights are larger.")
    unfinished = temporary_path(path)
    try:
        with evaluation_mode(model), torch.no_grad(), lower_operators(standard=standard):
            nodes, sizes, difference, compared = _write_first_match(
                port, programs(port, length, fixed), model, unfinished, opset, tolerance, standard=standard
            )
        os.replace(unfinished, path)
    except OSError as why:
        raise MixerError(f"export_onnx: {path} cannot be written ({why.strerror or why}).") from why
    finally:
        unfinished.unlink(missing_ok=True)
    written = OnnxModel(path)
    return OnnxReport(
        str(path),
        written.shapes(),
        written.shapes(outputs=True),
        sizes,
        difference,
        compared,
        nodes,
        path.stat().st_size,
    )


def _write_first_match(
    port: Port,
    made: Iterable[tuple[torch.export.ExportedProgram, Sizes]],
    model: nn.Module,
    path: Path,
    opset: int | None,
    tolerance: float,
    *,
    standard: bool,
) -> tuple[int, Sizes, float, int]:
    """Write the first program whose file matches torch at all its sizes.

    Returns:
        Number of nodes, sizes, largest difference, how many numbers were compared.
    """
    failure = None
    for program, sizes in made:
        nodes = _write(program, port, sizes, model, path, opset, standard=standard)
        file = OnnxModel(path)
        if not _as_free(file, port, sizes):  # the translation to ONNX fixed a size that torch.export had left free
            continue
        try:
            return nodes, sizes, *_compare(file, port, sizes, tolerance)
        except MixerError as why:
            failure = why
    assert failure is not None
    raise failure


def _check_operators(operators: object, opset: int | None) -> bool:
    """Return whether ONNX's standard operators are asked for, which fix the opset."""
    if operators not in ("primitive", "standard"):
        raise MixerError(f"export_onnx: operators must be 'primitive' or 'standard', got {operators!r}.")
    if operators == "standard" and opset is not None:
        raise MixerError(f"export_onnx: operators='standard' writes opset 27; leave out opset={opset!r}.")
    return operators == "standard"


def _check_onnx(opset: int | None) -> None:
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise MixerError(f"export_onnx needs {', '.join(missing)}: pip install 'tokenmix[onnx]'.")
    from onnx.defs import onnx_opset_version

    if opset is not None and (not isinstance(opset, int) or not OLDEST_OPSET <= opset <= onnx_opset_version()):
        raise MixerError(f"export_onnx: opset must be in {OLDEST_OPSET}..{onnx_opset_version()}, got {opset!r}.")


def _names(example: object, roots: tuple[str, ...]) -> list[str]:
    """Return a name for each tensor: that of its argument, then the fields that lead to it."""
    paths: Any = pytree.tree_flatten_with_path(example)[0]
    return [
        ".".join([roots[path[0].idx], *(str(getattr(key, "name", getattr(key, "idx", key))) for key in path[1:])])
        for path, _ in paths
    ]


def _write(
    program: torch.export.ExportedProgram,
    port: Port,
    sizes: Sizes,
    model: nn.Module,
    path: Path,
    opset: int | None,
    *,
    standard: bool,
) -> int:
    """Write the ONNX file with named inputs, outputs and axes, and metadata; return its number of nodes."""
    from .lowering import drop_nan_tests, lower_model, raise_opset, whole_operators

    example = port.example(1, short_length(port))
    result = port.module(*example)
    ins, outs = (
        _names(example, port.names),
        _names(result if isinstance(result, tuple) else (result,), port.results),
    )
    whole = whole_operators()
    if any(node.target in whole for node in program.graph.nodes):  # else the exporter's own pass is enough
        program = program.run_decompositions(whole)
    with silence_exporters():
        try:
            made = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=ins,
                output_names=outs,
                opset_version=opset,
            )
        except torch.onnx.OnnxExporterError as why:
            said = str(why.__cause__ or why).split(".")[0]
            reason = " ".join(said.split())[:200]
            raise MixerError(f"export_onnx: torch.onnx cannot translate {type(model).__name__} ({reason}).") from why
    assert made is not None
    if standard:
        raise_opset(made.model)
    lower_model(made.model)
    drop_nan_tests(made.model)
    _name_axes(made.model, program, port)
    about = {
        KEY: __version__,
        "kind": type(model).__name__,
        "form": "decode" if port.decodes else "forward",
        "config": _config(model) if port.config is None else port.config,
    }
    about |= {"sizes": asdict(sizes)}
    if port.decodes:
        _, start = port.example(1, 0)
        about["state"] = {
            name: encode_row(row[0]) for name, row in zip(ins[1:], pytree.tree_leaves(start), strict=True)
        }
    made.model.metadata_props[KEY] = json.dumps(about)
    made.save(str(path))
    return len(list(made.model.graph))


def _as_free(file: OnnxModel, port: Port, sizes: Sizes) -> bool:
    """Return whether a file whose length is free has no fixed number on its length axes."""
    if port.size is not None or sizes.length[0] == sizes.length[1]:
        return True
    _, axes = varying_axes(port, short_length(port))
    return all(
        isinstance(end.shape[axis], str)
        for end, (_, along) in zip(file.session.get_inputs(), axes, strict=True)
        for axis in along
    )


def _name_axes(model: Any, program: torch.export.ExportedProgram, port: Port) -> None:
    """Name the free axes batch, and length or past, instead of torch's symbols; number other sizes that grow."""
    length = short_length(port)
    names: dict[str, str] = {}
    whole = "past" if port.decodes else "length"
    args, axes = varying_axes(port, length)
    for value, shape, (batch, _) in zip(pytree.tree_leaves(args), input_shapes(program), axes, strict=True):
        for axis, size in enumerate(shape):
            if not isinstance(size, int) and str(size) not in names:
                name = "batch" if axis in batch else whole if value.shape[axis] == length else ""
                # one name, one size
                names[str(size)] = name if name and name not in names.values() else f"size_{len(names)}"
    ends = (*model.graph.inputs, *model.graph.outputs)
    for value in {out for node in model.graph.all_nodes() for out in node.outputs} - set(ends):
        value.shape = None  # ONNX Runtime infers shapes, and plans memory by those that a file states
    for value in ends:
        for axis, size in enumerate(value.shape or ()):
            if not isinstance(size, int) and size.value is not None:
                value.shape[axis] = " ".join(names.get(word, word) for word in str(size.value).split(" "))


def _config(model: Any) -> Record:
    """Return the config of a model, or the common facts of a mixer."""
    config = getattr(getattr(model, "backbone", model), "config", None)
    return (
        config.to_json() if config is not None else {"dim": model.dim, "causal": model.causal, "max_len": model.max_len}
    )


def _compare(file: OnnxModel, port: Port, sizes: Sizes, tolerance: float) -> tuple[float, int]:
    """Compare the file with torch on fresh inputs of several sizes.

    Returns:
        The largest difference, and how many numbers were compared.

    Raises:
        MixerError: if the difference exceeds the tolerance.
    """
    low, high = sizes.length
    most = high if high is not None else 40
    lengths = dict.fromkeys([low, (low + most) // 2, most] if port.size is None else [port.size])
    worst, compared, largest = 0.0, 0, 0
    for i, length in enumerate(lengths):
        for batch in (1, 5 + i) if sizes.batch is None else (sizes.batch,):
            if batch > 1 and sizes.batch is None and batch * largest > NUMBERS:
                batch = 2
            args = port.example(batch, length)
            with _in_one_line(f"batch {batch}, length {length}"):
                pairs = _stream(file, port, batch) if port.decodes and i == 0 else []
                got = file._run(tuple(pytree.tree_leaves(args)))
            want = pytree.tree_leaves(port.module(*args))
            largest = max(y.numel() for y in want) // batch
            if port.masked:  # outputs at masked tokens are undefined
                keep = args[1].bool()
                got, want = (
                    [y[keep] if own else y for y, own in zip(each, port.tokenwise, strict=True)] for each in (got, want)
                )
            for ours, theirs in [*pairs, *zip(got, want, strict=True)]:
                worst, compared = max(worst, difference(ours, theirs)), compared + theirs.numel()
    if not worst <= tolerance:
        apart = f"ONNX Runtime and torch differ by {worst:.2g}, more than {tolerance:g}"
        raise MixerError(f"export_onnx: {apart}; no file was written. This is a defect, please report it.")
    return worst, compared


@contextmanager
def _in_one_line(sizes: str) -> Iterator[None]:
    """Raise a one-line MixerError for whatever ONNX Runtime raises; its errors share no base class."""
    try:
        yield
    except Exception as why:
        reason = " ".join(str(why).split())[:200]
        failed = f"ONNX Runtime cannot run the program at {sizes}; no file was written"
        raise MixerError(f"export_onnx: {failed} ({reason}). Please report it.") from why


def _stream(file: OnnxModel, port: Port, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and states of six steps from the first token on, each side with its own state."""
    args, start = port.example(batch, 0)
    ours, theirs, pairs = file.init_state(batch), start, []
    steps = 6 if port.longest is None else min(6, (port.longest + args.shape[1]) // args.shape[1])
    for _ in range(steps):
        got, ours = file.extend(args, ours)
        want, theirs = port.module(args, theirs)
        pairs += [(got, want), *zip(ours, pytree.tree_leaves(theirs), strict=True)]
        args = args.roll(1, -1)
    return pairs
