"""Time and weigh the recurrent layers of transformers before ``cpu_kernels`` and after it.

    python -m benchmarks.cpu_kernels             # print the table
    python -m benchmarks.cpu_kernels --record    # and keep it in results/cpu_kernels.json
    python -m benchmarks.cpu_kernels --model     # a model of 0.5 billion parameters: packed training, generation

One layer with random weights at the widths of published models, 16 heads of 128 features, on one thread, before and
after in turns in one process, after their outputs (and gradients) were found equal. Times are the least CPU-seconds of
a call. A call that would take longer than ``--seconds``, or more than half of the free memory, by the one at a shorter
length, is left out and named. Peaks are resident bytes above weights and inputs, each in a process of its own.

``--model`` builds a Qwen3.5-like model and takes one step of SGD on documents of different lengths: one after the
other and in padded rows before, packed into one row after. Then it writes 64 tokens after a prompt of 64.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix.hosts import cpu_kernels
from tokenmix.lab.bench.roofline import machine
from tokenmix.system.machine import memory_available, process_memory, reset_peak
from tokenmix.system.torchvision import ensure_torchvision

RECORD = Path(__file__).parent / "results" / "cpu_kernels.json"
LENGTHS, CONTEXT = (128, 1024, 4096), 64
EQUAL = 5e-4  # of outputs and gradients, relative to the largest: their sums are float32 in another order
DOCUMENTS, PROMPT, NEW = (384, 256, 160, 96, 64, 64), 64, 64
WHO = ("before", "after")
Run = Callable[[], list[Tensor]]


def qwen3_5() -> nn.Module:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
    sizes |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return hf.Qwen3_5GatedDeltaNet(hf.Qwen3_5TextConfig(hidden_size=2048, num_hidden_layers=1, **sizes), 0)


def kimi_linear() -> nn.Module:
    from transformers.models.kimi_linear import modeling_kimi_linear as hf

    sizes = {"linear_num_heads": 16, "linear_head_dim": 128, "num_hidden_layers": 1, "layer_types": None}
    layer = hf.KimiLinearDeltaAttention(hf.KimiLinearConfig(hidden_size=2048, **sizes), 0)
    with torch.no_grad():  # they are left unwritten
        layer.forget_gate.A_log.zero_()
        layer.forget_gate.dt_bias.fill_(-2.0)
    return layer


def mamba2() -> nn.Module:
    from transformers.models.mamba2 import modeling_mamba2 as hf

    sizes = {"num_heads": 16, "head_dim": 128, "state_size": 128, "n_groups": 1}
    return hf.Mamba2Mixer(hf.Mamba2Config(hidden_size=1024, num_hidden_layers=1, **sizes), 0)


def lfm2() -> nn.Module:
    from transformers.models.lfm2 import modeling_lfm2 as hf

    return hf.Lfm2ShortConv(hf.Lfm2Config(hidden_size=2048, num_hidden_layers=1, layer_types=["conv"]), 0)


LAYERS: dict[str, Callable[[], nn.Module]] = {f.__name__: f for f in (qwen3_5, kimi_linear, mamba2, lfm2)}
WHATS = ("forward", "backward", "decode")
CASES = [(layer, what, T) for layer in LAYERS for what in WHATS for T in (LENGTHS if what != "decode" else (1,))]


def make_layer(name: str) -> Any:
    torch.manual_seed(0)
    return LAYERS[name]().eval()


def make_call(layer: Any, what: str, T: int) -> Run:
    """Return a call of a layer: outputs; outputs and gradients; or the output of one token after ``CONTEXT`` others."""
    draw = torch.Generator().manual_seed(1)
    width = next(p.shape[1] for name, p in layer.named_parameters() if name.endswith("proj.weight") or "qkv" in name)
    x = torch.randn(1, CONTEXT + 1 if what == "decode" else T, width, generator=draw)
    if what == "decode":
        return decode_call(layer, x)

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [layer(x)]

    def backward() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])]

    return forward if what == "forward" else backward


def decode_call(layer: Any, x: Tensor) -> Run:
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionLayer

    cache = DynamicCache()
    cache.layers = [LinearAttentionLayer()]
    with torch.no_grad():
        layer(x[:, :-1], cache=cache)

    def decode() -> list[Tensor]:
        with torch.no_grad():
            return [layer(x[:, -1:], cache=cache)]

    return decode


def peak(layer: str, what: str, T: int, who: str) -> float:
    """Return the MiB above weights and inputs at the peak of one call, in a process of its own."""
    code = f"from benchmarks.cpu_kernels import print_peak; print_peak({layer!r}, {what!r}, {T}, {who!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def print_peak(name: str, what: str, T: int, who: str) -> None:
    ensure_torchvision()
    torch.set_num_threads(1)
    layer = make_layer(name)
    if who == "after":
        cpu_kernels(layer)
    make_call(layer, what, 16)()  # what is loaded once
    run = make_call(layer, what, T)
    before = process_memory("VmRSS")
    reset_peak(torch.device("cpu"))
    run()
    after = process_memory("VmHWM")
    print(0.0 if before is None or after is None else (after - before) / 2**20)


def largest_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def time_call(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(name: str, what: str, T: int, seconds: float, known: dict[str, Any] | None) -> dict[str, Any]:
    """Return the least times of both in turns, within ``seconds``, and their peaks; or why the case is left out."""
    row: dict[str, Any] = {"layer": name, "what": what, "tokens": T}
    if known is not None:
        more = T / known["tokens"]
        wanted, room = known["seconds"]["before"] * more, known["peak_mib"]["before"] * more
        if wanted > seconds or room * 2**21 > (memory_available() or 0):
            return row | {"left_out": f"transformers would take about {wanted:.0f} s and {room:,.0f} MiB"}
    layers = {"before": make_layer(name)}
    layers["after"] = copy.deepcopy(layers["before"])
    cpu_kernels(layers["after"])
    runs = {who: make_call(layers[who], what, T) for who in WHO}
    off = largest_difference(runs["after"](), runs["before"]())
    if off > EQUAL:
        raise SystemExit(f"{name} {what} {T}: the kernels differ from transformers by {off:.1e}, so no time is taken.")
    least, end, turns = dict.fromkeys(WHO, float("inf")), time.perf_counter() + seconds, 0
    while turns < 2 or time.perf_counter() < end:
        for who in WHO:
            least[who] = min(least[who], time_call(runs[who]))
        turns += 1
    if what == "decode":
        return row | {"difference": off, "seconds": least}
    return row | {"difference": off, "seconds": least, "peak_mib": {who: peak(name, what, T, who) for who in WHO}}


def print_row(row: dict[str, Any]) -> None:
    head = [row["layer"], row["what"], row["tokens"]]
    if "left_out" in row:
        cells = [*head, row["left_out"], "", "", "", "", ""]
    else:
        t, m = row["seconds"], row.get("peak_mib")
        cells = [*head, f"{t['before'] * 1e3:.2f}", f"{t['after'] * 1e3:.2f}", f"{t['before'] / t['after']:.1f}"]
        cells += [f"{m[who]:.0f}" for who in WHO] if m else ["", ""]
        cells.append(f"{row['difference']:.0e}")
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def make_model() -> Any:
    """Return a Qwen3.5-like model with three gated delta layers to one of attention; embeddings are shared."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    sizes = {"linear_num_key_heads": 16, "linear_num_value_heads": 16}
    sizes |= {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 16, "vocab_size": 151_936}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256}
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(tie_word_embeddings=True, **sizes)).eval()


def documents() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 151_936, (n,), generator=draw) for n in DOCUMENTS]


def make_batches(how: str) -> list[dict[str, Tensor]]:
    """Return the documents packed into one row, in padded rows, or one by one; first tokens have no label."""
    rows = documents()
    if how == "packed":
        labels = torch.cat([torch.cat([row.new_full((1,), -100), row[1:]]) for row in rows])
        positions = torch.cat([torch.arange(len(row)) for row in rows])
        return [{"input_ids": torch.cat(rows)[None], "labels": labels[None], "position_ids": positions[None]}]
    if how == "apart":
        return [{"input_ids": row[None], "labels": row[None]} for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    ids, mask = pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}]


def train_step(model: Any, how: str) -> float:
    """Take one step of SGD with the mean loss of all tokens, checkpointed, and return that loss."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    total, count = 0.0, sum(DOCUMENTS) - len(DOCUMENTS)
    for batch in make_batches(how):
        loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
        loss.backward()
        total += float(loss.detach())
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    model.zero_grad(set_to_none=True)
    return total


def print_model(who: str, what: str, threads: int) -> None:
    """Print one JSON line: seconds and peak of a step of training, or of generation."""
    ensure_torchvision()
    torch.set_num_threads(threads)
    model = make_model()
    if who == "after":
        cpu_kernels(model)
    before = process_memory("VmRSS") or 0
    reset_peak(torch.device("cpu"))
    start, found = time.perf_counter(), {}
    if what == "generate":
        text = model.generate(documents()[1][None, :PROMPT], max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
        found["text"] = text[0, PROMPT:].tolist()
    else:
        found["loss"] = train_step(model, what)
    found["seconds"] = round(time.perf_counter() - start, 2)
    found["peak_mib"] = round(((process_memory("VmHWM") or 0) - before) / 2**20)
    found["parameters"] = sum(p.numel() for p in model.parameters())
    print(json.dumps(found))


def measure_model(threads: int) -> list[dict[str, Any]]:
    """Measure each way in a process of its own, and print a table."""
    rows = []
    print("| what | who | s | peak MiB above weights | loss |")
    print("|---|---|---|---|---|")
    ways = (("before", "apart"), ("before", "padded"), ("after", "padded"), ("after", "packed"))
    for who, what in (*ways, ("before", "generate"), ("after", "generate")):
        code = f"from benchmarks.cpu_kernels import print_model; print_model({who!r}, {what!r}, {threads})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        row = {"what": what, "who": who, "threads": threads, **json.loads(done.stdout.splitlines()[-1])}
        rows.append(row)
        print("| " + " | ".join(str(row.get(n, "")) for n in ("what", "who", "seconds", "peak_mib", "loss")) + " |")
    texts = [row["text"] for row in rows if "text" in row]
    same = sum(a == b for a, b in zip(*texts, strict=True))
    print(f"{rows[0]['parameters']:,} parameters; {same} of {NEW} generated tokens are the same")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="for each case")
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--whats", nargs="+", default=list(WHATS), choices=WHATS)
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--threads", type=int, default=2, help="for --model")
    given = parser.parse_args()
    ensure_torchvision()
    kept = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if given.model:
        kept["model"] = measure_model(given.threads)
    else:
        torch.set_num_threads(1)
        print("| layer | what | tokens | before, ms | after, ms | ratio | peak before, MiB | after | differ by |")
        print("|---|---|---|---|---|---|---|---|---|")
        last: dict[tuple[str, str], dict[str, Any]] = {}
        kept["rows"] = []
        for layer, what, T in CASES:
            if layer in given.layers and what in given.whats and (what == "decode" or T in given.lengths):
                row = measure(layer, what, T, given.seconds, last.get((layer, what)))
                kept["rows"].append(row)
                print_row(row)
                if "seconds" in row:
                    last[layer, what] = row
    if given.record:
        RECORD.write_text(json.dumps({"machine": machine(), **kept}, indent=1) + "\n")


if __name__ == "__main__":
    main()
