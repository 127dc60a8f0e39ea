r"""From a folder to a faster service, in generation: train a small GPT-2, replace its attention, teach it, compare.

    python benchmarks/generation_service.py train ORIGINAL --text enwik8.gz [--steps 2000]
    python benchmarks/generation_service.py train MORE --text enwik8.gz --start ORIGINAL/model --steps 500
    python benchmarks/generation_service.py teach ORIGINAL OUT --text enwik8.gz [--mixer JSON] [--last 3]
    python benchmarks/generation_service.py time ORIGINAL OUT [--contexts 128 480 960] [--batches 1 32]
    python benchmarks/generation_service.py record ORIGINAL MORE OUT [OUT ..] --to results.json --picture picture.png

``train`` trains a GPT-2 of transformers on the bytes of a text and writes ``model``, a folder of transformers with a
tokenizer of bytes; with ``--start`` it trains such a folder further: the honest comparison for ``teach``, which
replaces the attention of the last layers, distils for as many steps in all, and writes ``OUT/model``. Both write
``quality.json``: bits per byte on the last tenth of the text. ``time``, a process of its own, loads the folder,
compares what it answers with what ``teach`` answered, and writes ``OUT/times.json``: the time of a token of
``generate()`` and the bytes of the cache in torch, and the time of a decode step in ONNX Runtime, both models in turns.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from generate_lengths import once
from sentence_service import ROUNDS, compare_turns, stopwatch
from tokenmix.errors import MixerError
from tokenmix.export import OnnxModel, export_onnx
from tokenmix.hosts import load_converted, replace_mixers, save_replaced
from tokenmix.lab.bench.roofline import machine
from tokenmix.lab.train import OptimConfig, distill
from tokenmix.lab.train.optim import build_optimizers, update
from tokenmix.system.files import read_json, write_json

import transformers  # isort: skip  (after the adapter of generate_lengths, which repairs torchvision)

BYTES, HELD, NEW = 256, 128, 16
SIZES = ("n_embd", "n_layer", "n_head", "n_positions")


def read_bytes(path: Path, most: int) -> tuple[Tensor, Tensor]:
    """Return the first bytes of a text to learn from, and the last tenth of them to score."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        data = torch.frombuffer(bytearray(file.read(most)), dtype=torch.uint8)
    cut = len(data) - len(data) // 10
    return data[:cut], data[cut:]


def byte_characters() -> list[str]:
    """Return the character by which a byte-level tokenizer of GPT-2's kind names each byte."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    other = [n for n in range(BYTES) if n not in printed]
    return [chr(n) if n in printed else chr(BYTES + other.index(n)) for n in range(BYTES)]


def byte_tokenizer() -> Any:
    """Build the tokenizer whose number of a byte is its value."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(byte_characters())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def batches(data: Tensor, size: int, length: int, seed: int) -> Callable[[int], dict[str, Tensor]]:
    """Return a function from the step to its batch: windows of the text, the same in every run."""

    def batch(step: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(data) - length, (size,), generator=draw)
        ids = torch.stack([data[start : start + length] for start in starts.tolist()]).long()
        return {"input_ids": ids, "labels": ids}

    return batch


@torch.no_grad()
def bits(model: Any, held: Tensor) -> list[float]:
    """Return the bits per byte of each of up to ``HELD`` windows, of as many bytes as the model has positions."""
    length = model.config.n_positions
    rows = held[: len(held) // length * length].view(-1, length)
    if not len(rows):
        raise MixerError(f"the text: its last tenth has {len(held)} bytes; a window of {length} needs as many.")
    rows = rows[:: max(1, len(rows) // HELD)][:HELD].long()
    found = []
    for part in rows.split(4):
        logits = model.eval()(input_ids=part).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="none")
        found += (loss.view(len(part), -1).mean(1) / math.log(2)).tolist()
    return found


def train_model(model: Any, batch: Callable[[int], dict[str, Tensor]], config: OptimConfig, steps: int) -> None:
    """Train a language model by the library's optimiser."""
    optimizers = build_optimizers(model, config)
    model.train()
    for step in range(steps):
        loss = model(**batch(step)).loss
        loss.backward()
        update(model, optimizers, config, step, steps)
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:,} of {steps:,}: {loss.item() / math.log(2):.3f} bits per byte", flush=True)
    model.eval()


def train(given: argparse.Namespace) -> None:
    """Train a GPT-2, or train one further."""
    torch.manual_seed(given.seed)
    learn, held = read_bytes(given.text, given.bytes)
    if given.start is None:
        sizes = {"n_embd": given.dim, "n_layer": given.layers, "n_head": given.heads, "n_positions": given.positions}
        quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        ends = {"bos_token_id": None, "eos_token_id": None}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=BYTES, **sizes, **quiet, **ends))
    else:
        model = transformers.GPT2LMHeadModel.from_pretrained(given.start)
    # a model that is trained further sees the batches that its converted twin sees
    batch = batches(learn, given.batch, model.config.n_positions, given.seed + (given.start is not None))
    began = time.process_time()
    train_model(model, batch, OptimConfig(lr=given.rate, warmup=given.steps // 20), given.steps)
    spent = time.process_time() - began
    model.save_pretrained(given.out / "model")
    byte_tokenizer().save_pretrained(given.out / "model")
    found = {"parameters": model.num_parameters(), "config": {k: getattr(model.config, k) for k in SIZES}}
    found |= {"steps": given.steps, "batch": given.batch, "seed": given.seed, "rate": given.rate}
    write_json(given.out / "quality.json", found | {"cpu_seconds": spent, "bits_per_byte": bits(model, held)})


@torch.no_grad()
def answers(model: Any, held: Tensor) -> dict[str, Tensor]:
    """Return what a model says of a text and how it goes on, to be compared in another process."""
    room = model.config.n_positions
    prompt = held[: room // 2].long()[None]
    told = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": min(64, room // 2), "do_sample": False}
    return {"logits": model(input_ids=prompt).logits, "tokens": model.generate(prompt, pad_token_id=0, **told)}


def teach(given: argparse.Namespace) -> None:
    """Replace, distil, save, score."""
    torch.manual_seed(given.seed)
    learn, held = read_bytes(given.text, given.bytes)
    teacher: Any = transformers.GPT2LMHeadModel.from_pretrained(given.original / "model").eval()
    spec = json.loads(given.mixer)
    student, report = replace_mixers(teacher, {"*": spec}, last=given.last, seed=given.seed)
    print(report)
    before, began = bits(student, held), time.process_time()
    distill(
        teacher,
        student,
        batches(learn, given.batch, teacher.config.n_positions, given.seed + 1),
        out=given.out / "run",
        layer_steps=given.layer_steps,
        steps=given.steps,
        train="all",
        task_weight=1.0,
        lr=given.rate,
        seed=given.seed,
        resume=(given.out / "run").exists(),
    )
    spent = time.process_time() - began
    student.eval()
    save_replaced(student, given.out / "model", report, beside=given.original / "model")
    torch.save(answers(student, held), given.out / "answers.pt")
    found = {"mixer": spec, "last": given.last, "steps": [given.layer_steps, given.steps], "seed": given.seed,
             "parameters": student.num_parameters(), "cpu_seconds": spent,
             "bits_per_byte": {"before": before, "after": bits(student, held)}}  # fmt: skip
    write_json(given.out / "quality.json", found)


def check_answers(model: Any, out: Path, held: Tensor) -> float:
    """Return the largest difference of a loaded model's logits from those of the model that was saved.

    Raises:
        MixerError: if it is above 1e-6, or if ``generate()`` writes other tokens.
    """
    wanted, found = torch.load(out / "answers.pt"), answers(model, held)
    apart = float((wanted["logits"] - found["logits"]).abs().max())
    if apart > 1e-6 or not torch.equal(wanted["tokens"], found["tokens"]):
        raise MixerError(f"{out / 'model'}: answers otherwise than the model that was saved (logits by {apart:.1e}).")
    return apart


def measure(given: argparse.Namespace) -> None:
    """Time a token of both models, by ``generate()`` and by a decode step in ONNX Runtime, in turns."""
    torch.set_num_threads(given.threads)
    original: Any = transformers.GPT2LMHeadModel.from_pretrained(given.original / "model").eval()
    models = {"original": original, "new": load_converted(given.out / "model").eval()}
    apart = check_answers(models["new"], given.out, read_bytes(given.text, given.bytes)[1])
    found = {"threads": given.threads, "machine": machine(), "difference_in_a_fresh_process": apart, "rows": []}
    at = [(batch, context) for batch in given.batches for context in given.contexts]
    for row in chain((time_generate(models, context, batch, given.rounds) for batch, context in at),
                     time_steps(models, given)):  # fmt: skip
        found["rows"].append(row)
        write_json(given.out / "times.json", found)
        print("{runtime}, batch {batch}, {context} tokens before: {original:.5f} s, {new:.5f} s, {ratio:.2f} times"
              .format(**row), flush=True)  # fmt: skip


def time_generate(models: dict[str, Any], context: int, batch: int, rounds: int) -> dict[str, Any]:
    """Return the seconds of a token after some others, in ``generate()``, and the bytes of the caches."""
    prompt = torch.randint(BYTES, (batch, context), generator=torch.Generator().manual_seed(0))
    held: dict[str, int] = {}

    def token(name: str) -> float:
        found = once(models[name], prompt, NEW)
        held[name] = found["cache_bytes"]
        return found["ms_per_token"] / 1e3

    told = compare_turns({name: partial(token, name) for name in models}, rounds)
    return {"runtime": "torch", "batch": batch, "context": context, "cache_bytes": held} | told


def time_steps(models: dict[str, Any], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the seconds of a decode step in ONNX Runtime, where layers that kept attention are mixers too."""
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, model in models.items():
            began = time.perf_counter()
            export_onnx(replace_mixers(model, "attention")[0].eval(), Path(folder) / f"{name}.onnx", decode=True)
            print(f"{name}: exported in {time.perf_counter() - began:.0f} s", flush=True)
            files[name] = OnnxModel(Path(folder) / f"{name}.onnx", threads=given.threads)
        for batch in given.batches:
            ids = torch.randint(BYTES, (batch, max(given.contexts)), generator=torch.Generator().manual_seed(0))
            states = {name: file.init_state(batch) for name, file in files.items()}
            for at, token in enumerate(ids.split(1, dim=1), start=1):
                states = {name: file.extend(token, states[name])[1] for name, file in files.items()}
                if at in given.contexts:
                    calls = {name: partial(file.extend, token, states[name]) for name, file in files.items()}
                    held = {name: sum(t.nbytes for t in state) for name, state in states.items()}
                    row = {"runtime": "ONNX Runtime", "batch": batch, "context": at, "cache_bytes": held}
                    yield row | compare_turns({n: partial(stopwatch, c) for n, c in calls.items()}, 8 * ROUNDS)


def record(given: argparse.Namespace) -> None:
    """Gather what was found, and draw it."""
    found = {"original": read_json(given.original / "quality.json"), "more": read_json(given.more / "quality.json")}
    rows = [read_json(out / "quality.json") | read_json(out / "times.json") for out in given.out]
    for row in (found["original"], found["more"]):
        row["bits_per_byte"] = summary(row["bits_per_byte"], row["bits_per_byte"])
    more = read_json(given.more / "quality.json")["bits_per_byte"]
    for row in rows:
        row["bits_per_byte"] = {when: summary(each, more) for when, each in row["bits_per_byte"].items()}
    found |= {"machine": rows[0]["machine"], "threads": rows[0]["threads"]}
    found["rows"] = [{k: v for k, v in row.items() if k not in ("machine", "threads")} for row in rows]
    write_json(given.to, found)
    draw(found, given.picture)


def summary(values: list[float], against: list[float]) -> dict[str, float]:
    """Return the mean over the windows, and how much it is above another model's, with its standard error."""
    apart = torch.tensor(values) - torch.tensor(against)
    error = float(apart.std() / len(apart) ** 0.5) if len(apart) > 1 else 0.0
    return {"mean": sum(values) / len(values), "above_more": float(apart.mean()), "error": error}


def label(row: dict[str, Any]) -> str:
    """Return how a row is called."""
    return f"last {row['last']}: {row['mixer']['name']}"


def draw(found: dict[str, Any], picture: Path) -> None:
    """Draw bits per byte, times of a token and bytes of the cache."""
    from matplotlib.figure import Figure

    rows = found["rows"]
    batch = max(timed["batch"] for timed in rows[0]["rows"])
    figure = Figure(figsize=(13, 4), layout="constrained")
    quality, times, memory = figure.subplots(1, 3)
    names = ["original", "original, trained further", *(label(row) for row in rows)]
    means = [found[name]["bits_per_byte"]["mean"] for name in ("original", "more")]
    means += [row["bits_per_byte"]["after"]["mean"] for row in rows]
    quality.scatter(means, names, s=60, c=["#888888", "#444444", *["#2060a0"] * len(rows)])  # points: no zero in sight
    quality.set(title="bits per byte after training; left is better")
    quality.margins(0.1, 0.3)
    quality.grid(axis="x", alpha=0.4)
    quality.invert_yaxis()
    lines = {"original": (rows[0], "original")} | {label(row): (row, "new") for row in rows}
    for name, (row, which) in lines.items():
        timed = [each for each in row["rows"] if each["runtime"] == "torch" and each["batch"] == batch]
        at = [each["context"] for each in timed]
        times.plot(at, [1e3 * each[which] for each in timed], marker="o", label=name)
        memory.plot(at, [each["cache_bytes"][which] / 2**20 for each in timed], marker="o", label=name)
    times.set(title=f"ms for a token of each of {batch} texts in generate()", xlabel="tokens before", ylim=(0, None))
    memory.set(title=f"MiB of cache and state, batch {batch}", xlabel="tokens before", ylim=(0, None))
    memory.legend()
    figure.savefig(picture, dpi=100)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = argparse.ArgumentParser(add_help=False)
    text.add_argument("--text", type=Path, required=True)
    text.add_argument("--bytes", type=int, default=100_000_000, help="how many bytes of the text to use")
    learns = argparse.ArgumentParser(add_help=False)
    learns.add_argument("--batch", type=int, default=4)
    learns.add_argument("--steps", type=int, default=2000)
    learns.add_argument("--rate", type=float, default=1e-3)
    learns.add_argument("--seed", type=int, default=0)
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("train", parents=[text, learns])
    verb.add_argument("out", type=Path)
    verb.add_argument("--start", type=Path)
    for name, default in (("dim", 192), ("layers", 4), ("heads", 6), ("positions", 1024)):
        verb.add_argument(f"--{name}", type=int, default=default)
    verb.set_defaults(run=train)
    verb = verbs.add_parser("teach", parents=[text, learns])
    verb.add_argument("original", type=Path)
    verb.add_argument("out", type=Path)
    verb.add_argument("--mixer", default='{"name": "gated_delta"}')
    verb.add_argument("--last", type=int, default=3)
    verb.add_argument("--layer-steps", type=int, default=100)
    verb.set_defaults(run=teach, steps=400)
    verb = verbs.add_parser("time", parents=[text])
    verb.add_argument("original", type=Path)
    verb.add_argument("out", type=Path)
    verb.add_argument("--contexts", type=int, nargs="+", default=[128, 480, 960])
    verb.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    verb.add_argument("--rounds", type=int, default=ROUNDS)
    verb.add_argument("--threads", type=int, default=torch.get_num_threads())
    verb.set_defaults(run=measure)
    verb = verbs.add_parser("record")
    for name in ("original", "more"):
        verb.add_argument(name, type=Path)
    verb.add_argument("out", type=Path, nargs="+")
    verb.add_argument("--to", type=Path, required=True)
    verb.add_argument("--picture", type=Path, required=True)
    verb.set_defaults(run=record)
    given = parser.parse_args()
    try:
        given.run(given)
    except (MixerError, OSError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
