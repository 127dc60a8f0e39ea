"""The verbs that carry weights from one model or format to another: convert and export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from ...errors import MixerError
from .arguments import given_options, parse_lengths
from .output import say, say_json


@dataclass(frozen=True)
class Convert:
    """Replace softmax attention with other mixers and carry its weights over.

    The target is a ViT of this library, or the same model of transformers or timm (the host) with some layers replaced.
    Train a converted ViT with `--train.init DIR`; load a converted host with `tokenmix.hosts.load_converted(DIR)`.
    """

    source: Positional[Annotated[str, arg(metavar="SOURCE")]]
    """Model to convert: a ViT checkpoint (.safetensors, .pth, .bin), a run directory, or timm:NAME.
    Folders saved by transformers are given as FOLDER or hf:FOLDER."""

    target: Positional[Annotated[str, arg(metavar="TARGET")]]
    """ViT of this library: the name of a model (see `tokenmix list`), or a mixer spec or one per layer, as JSON.
    Host: one spec, or JSON that maps patterns of attention modules to specs: '{"encoder.layer.*": {"name": "hydra"}}'.
    A ViT of timm or transformers counts as a host only if the target is given as patterns."""

    out: Path
    """Directory to write; it receives config.json, model.safetensors and report.json."""

    resize: bool = False
    """ViT of this library: allow another image size; learned positions are interpolated."""

    classes: int | None = None
    """ViT of this library: number of classes of a new head. Default: keep the head."""

    last: int | None = None
    """Host: replace only the last N of the modules that a pattern matches. Default: all."""

    every: int | None = None
    """Host: replace only every N-th of the modules that a pattern matches, counting from the last. Default: all."""

    init: Literal["copy", "random"] = "copy"
    """Host: initial weights of the mixers. copy: those of the attention they replace; random: new ones."""

    data: Path | None = None
    """Host: text file on which the models before and after are compared; what was gained and lost is printed."""

    lengths: str | None = None
    """Host: lengths in tokens, or sides of images, at which both are timed, such as 128,1k. Default: none."""

    seed: int = 0
    """Seed of new weights."""

    json: bool = False
    """Print the report as JSON."""

    def run(self) -> int:
        """Convert the model and print the report."""
        from ...hosts.surgery.save_load import convert_any
        from ..train.config import check_seed

        check_seed(self.seed, "convert: seed")
        ours = {"resize": self.resize, "classes": self.classes}
        host = {"last": self.last, "every": self.every, "init": self.init}
        lengths = () if self.lengths is None else parse_lengths(self.lengths, "convert")
        if self.data is not None and not self.data.is_file():
            raise MixerError(f"convert: --data {self.data}: no such file; a text file is needed.")
        report, load = convert_any(self.source, self.target, self.out, ours=ours, host=host, seed=self.seed)
        compared = None
        if self.data is not None or lengths:
            from .host_folders import compare_converted

            compared = compare_converted(self.source, self.out, self.data, lengths)
        if self.json:
            say_json(report.to_json() | ({} if compared is None else {"compared": compared.to_json()}))
        else:
            say("\n".join([str(report), *([] if compared is None else [compared.text()]), load]))
        return 0


@dataclass(frozen=True)
class Export:
    """Export a model as a Hugging Face folder with a model card, or as an ONNX file that ONNX Runtime has checked."""

    source: Positional[Annotated[str, arg(metavar="SOURCE")]]
    """Run directory. ONNX: also a folder written by `tokenmix convert`, or the name of a model, which gets random
    weights."""

    out: Positional[Annotated[Path, arg(metavar="OUT")]]
    """File to write, whose name ends in .onnx, or Hugging Face folder, which AutoModelForCausalLM or
    AutoModelForImageClassification loads."""

    format: Literal["hf", "onnx"] | None = None
    """Format to write: hf or onnx. Default: onnx if the name of OUT ends in .onnx, else hf."""

    step: str | None = None
    """Hugging Face: checkpoint to use: a step, last or best. Default: last."""

    decode: bool = False
    """ONNX: export a decode step, with the state as inputs and outputs, instead of the pass over a whole input."""

    length: int | None = None
    """ONNX: longest input in tokens. Default: the model's own maximum."""

    fixed: bool = False
    """ONNX: accept inputs of exactly --length tokens, no shorter ones."""

    key_mask: bool = False
    """ONNX: add an input that masks tokens."""

    chunk: int | None = None
    """ONNX: tokens per decode step. Default: 1."""

    opset: int | None = None
    """ONNX: version of the operator set, 18 or above. Default: the exporter's."""

    operators: Literal["primitive", "standard"] | None = None
    """ONNX: primitive, or standard: write gated linear recurrences as ONNX's LinearAttention (opset 27). Default:
    primitive."""

    seed: int | None = None
    """ONNX: seed of random weights. Default: 0."""

    json: bool = False
    """ONNX: print the report as JSON."""

    def run(self) -> int:
        """Write the folder or the file, and print its path or the report."""
        form = self.format or ("onnx" if self.out.suffix == ".onnx" else "hf")
        if form == "onnx" and self.step is not None:
            raise MixerError("export: --step is for Hugging Face folders; of a run, the last checkpoint becomes ONNX.")
        if form == "onnx":
            return self._export_onnx()
        if wrong := given_options(self, {"source", "out", "format", "step"}):
            how = "end the name of OUT in .onnx, or give --format onnx"
            raise MixerError(
                f"export: {', '.join(wrong)} is for ONNX, and {self.out} becomes a Hugging Face folder; {how}."
            )
        from ..hub import export_run

        say(export_run(self.source, self.out, step=self.step or "last"))
        return 0

    def _export_onnx(self) -> int:
        import torch

        from ...export import export_onnx
        from ...hosts.surgery import load_converted
        from ...models import MODELS, build_model
        from ..train.config import check_seed

        check_seed(self.seed, "export: seed")
        if self.source in MODELS:
            torch.manual_seed(self.seed or 0)
            model = build_model(self.source)
        elif Path(self.source).is_dir():
            model = load_converted(self.source)
        else:
            what = "neither a directory nor the name of a model"
            raise MixerError(f"export: {self.source!r} is {what}; `tokenmix list` shows the names.")
        report = export_onnx(
            model,
            self.out,
            decode=self.decode,
            length=self.length,
            fixed=self.fixed,
            key_mask=self.key_mask,
            chunk=1 if self.chunk is None else self.chunk,
            opset=self.opset,
            operators=self.operators or "primitive",
        )
        if self.json:
            say_json(report.to_json())
        else:
            say(report)
        return 0
