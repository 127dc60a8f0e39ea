"""Time again what `tokenmix advise --json` promises, and say whether it holds within 10 %.

The promise is how many times as fast a model is with a candidate, at a length, in a runtime. Loop and statistics are
this script's own: two models in alternating order, a few calls to a sample; the one statistic is the median, over the
turns, of the ratio of two samples taken one after the other. Nothing of the timing of advise is used.

    tokenmix advise ... --json > advice.json
    python -m benchmarks.retime_advice advice.json [more.json ...] [--seconds 10] [--out results.json]

The lines of benchmarks/results/retime_advice.json come from `--case NAME --runtime RUNTIME`, which runs advise first;
`--table` prints them as docs/hosts/advise.md has them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokenmix.export import export_onnx
from tokenmix.hosts.surgery import replace_mixers
from tokenmix.lab import cli
from tokenmix.lab.advise import Host, load_host
from tokenmix.lab.bench.roofline import machine

WITHIN = 0.1
SAMPLE_SECONDS = 0.02
MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
WHISPER = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "num_mel_bins": 80,
    "vocab_size": 1000,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
CASES: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "minilm": ("BertModel", MINILM, "128,512", "external"),
    "whisper": ("WhisperModel", WHISPER, None, "hydra"),
    "vit": ("timm:deit_tiny_patch16_224", {"depth": 4}, "224,448", "external"),
    "own": ("benchmarks.retime_advice:make_own", {}, "512", "external"),
}
"""Models by name: how advise loads them, the fields of their config, lengths and candidates."""


class Own(nn.Module):
    """A small encoder of vectors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ten numbers for each vector."""
        return self.head(self.encoder(x))


def make_own() -> tuple[nn.Module, Callable[[int, int], torch.Tensor]]:
    """Return the model of one's own, and its inputs."""
    torch.manual_seed(0)
    return Own(), lambda length, batch: torch.zeros(batch, length, 128)


def run_advice(case: str, runtime: str, seconds: float, chosen: str | None = None) -> dict[str, Any]:
    """Run the command for a case, at other lengths if some are chosen, and return its JSON."""
    name, options, lengths, candidates = CASES[case]
    lengths = chosen or lengths
    argv = ["advise", name, "--options", json.dumps(options), "--candidates", candidates, "--runtime", runtime]
    argv += ["--seconds", str(seconds), "--probe", "0", "--json", *(["--lengths", lengths] if lengths else [])]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert cli.main(argv) == 0
    return json.loads(out.getvalue())


def make_call(model: nn.Module, host: Host, length: int, batch: int, runtime: str, folder: Path) -> Callable[[], Any]:
    """Return one pass of a model in a runtime, by torch and onnxruntime directly."""
    args, named = host.inputs.make(length, batch)
    if runtime == "onnx":
        import onnxruntime

        path, options = folder / f"{len(list(folder.iterdir()))}.onnx", onnxruntime.SessionOptions()
        export_onnx(model, path, length=length, fixed=True, inputs=host.inputs.make)
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        tensors = [t for t in (*args, *named.values()) if isinstance(t, torch.Tensor)]
        feed = {end.name: t.numpy() for end, t in zip(session.get_inputs(), tensors, strict=True)}
        return lambda: session.run(None, feed)
    if runtime == "compile":
        compiled = torch.compile(model, dynamic=False)
        return lambda: compiled(*args, **named)
    return lambda: model(*args, **named)


def paired_ratios(before: Callable[[], Any], after: Callable[[], Any], seconds: float) -> list[float]:
    """Return before / after of each turn, in which both are timed, in alternating order."""
    calls = (before, after)
    for call in calls:
        for _ in range(3):
            call()
    counts = []
    for call in calls:
        began = time.perf_counter()
        call()
        counts.append(max(1, round(SAMPLE_SECONDS / (time.perf_counter() - began))))
    began, found = time.perf_counter(), []
    while time.perf_counter() - began < seconds or len(found) < 6:
        taken = [0.0, 0.0]
        for i in (0, 1) if len(found) % 2 else (1, 0):
            calls[i]()  # the caches and threads of the other are gone
            start = time.perf_counter()
            for _ in range(counts[i]):
                calls[i]()
            taken[i] = (time.perf_counter() - start) / counts[i]
        found.append(taken[0] / taken[1])
    return sorted(found)


@torch.no_grad()
def retime(advice: dict[str, Any], seconds: float) -> Iterator[dict[str, Any]]:
    """Time every promise of an advice again: candidates with a speed-up, in the runtime that it is about."""
    runtime, batch = advice["setting"]["runtime"], advice["setting"]["batch"]
    host = load_host(advice["model"]["name"], advice["model"]["options"])
    for row in advice["candidates"]:
        if row["runtime"] != runtime or row["speedup"] is None or row["mixer"] not in advice["specs"]:
            continue
        host.inputs.fit(host.model, row["length"])
        student = replace_mixers(host.model, advice["specs"][row["mixer"]], seed=0)[0].eval()
        torch._dynamo.reset()  # torch compiles 8 programs of one function, and runs more eagerly
        with tempfile.TemporaryDirectory() as folder:
            calls = [make_call(m, host, row["length"], batch, runtime, Path(folder)) for m in (host.model, student)]
            ratios = paired_ratios(calls[0], calls[1], seconds)
        again, promised = statistics.median(ratios), row["speedup"]
        line = {"mixer": row["mixer"], "length": row["length"], "runtime": runtime, "promised": promised}
        line |= {"promised_quartiles": [row["least"], row["most"]], "found": again, "turns": len(ratios)}
        line |= {"found_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]}
        yield {**line, "within": abs(promised / again - 1) <= WITHIN}


def table(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table of docs/hosts/advise.md."""
    lines = [
        "| model | length | runtime | candidate | promised | found | within 10 % |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results["lines"]:
        numbers = [
            f"{r[one]:.2f} ({r[both][0]:.2f} to {r[both][1]:.2f})"
            for one, both in (("promised", "promised_quartiles"), ("found", "found_quartiles"))
        ]
        cells = [r["model"], str(r["length"]), r["runtime"], r["mixer"], *numbers, "yes" if r["within"] else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("advice", nargs="*", type=Path, help="files of `tokenmix advise --json`")
    parser.add_argument("--case", choices=list(CASES))
    parser.add_argument("--runtime", default="eager")
    parser.add_argument("--lengths", help="in place of the case's own")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--out", type=Path, help="JSON to which the lines are added")
    parser.add_argument("--table", action="store_true", help="print the lines of --out as the page has them")
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(json.loads(given.out.read_text()))))
    advices = [json.loads(path.read_text()) for path in given.advice]
    advices += [run_advice(given.case, given.runtime, given.seconds, given.lengths)] if given.case else []
    for advice in advices:
        for line in retime(advice, given.seconds):
            about = {"model": given.case or advice["model"]["name"], "verdict": advice["answer"]["verdict"]}
            print(json.dumps(about | line), flush=True)
            if given.out:
                kept = json.loads(given.out.read_text()) if given.out.exists() else {"machine": machine(), "lines": []}
                same = ("model", "mixer", "length", "runtime")
                kept["lines"] = [k for k in kept["lines"] if any(k[n] != (about | line)[n] for n in same)]
                kept["lines"].append(about | line)
                given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
