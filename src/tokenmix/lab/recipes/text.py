"""A byte language model on any text: `--data stdlib`, `--data enwik8`, or the path of a file or folder."""

from __future__ import annotations

from ...models import LMConfig
from ..train import DataConfig
from ..train.config import OptimConfig, RunConfig, TrainConfig
from .recipe import Recipe, Row, shrink_spec

LOCAL = {"name": "aft_local", "window": 32, "rank": 128}
ATTENTION = {"name": "attention", "heads": 8}
DELTA = {"name": "gated_delta", "heads": 8}
KDA = {**DELTA, "decay": "feature", "gate": "sigmoid"}
ROWS = {
    "aft_local": Row("AFT-local, window 32", (LOCAL,), 24, 512, 1024),
    "attention": Row("softmax attention, the baseline", (ATTENTION,), 24, 512, 1024),
    "aft_simple": Row("AFT-simple", ({"name": "aft_simple"},), 24, 512, 1024),
    "aft_full": Row("AFT-full, factorised bias", ({"name": "aft_full", "rank": 128},), 24, 512, 1024),
    "aft_conv": Row(
        "causal AFT-conv, 16 heads, filters of 31",
        ({"name": "aft_conv", "heads": 16, "kernel_size": 31},),
        24,
        512,
        1024,
    ),
    "aft_forget": Row("AFT-forget", ({"name": "aft_forget"},), 24, 512, 1024),
    "aft_reach": Row("AFT-reach, 8 decays", ({"name": "aft_reach", "heads": 8, "reaches": 8},), 24, 512, 1024),
    "aft_pairs": Row("AFT-pairs, rank 4", ({"name": "aft_pairs", "heads": 8, "rank": 4},), 24, 512, 1024),
    "gated_delta": Row("Gated DeltaNet", (DELTA,), 24, 512, 1024),
    "kda": Row("Kimi Delta Attention, a decay per feature", (KDA,), 24, 512, 1024),
    "mamba2": Row("Mamba-2", ({"name": "mamba2", "heads": 8, "state_dim": 64},), 24, 512, 1024),
    "short_conv": Row("gated convolutions of 3 tokens, as in LFM2", ({"name": "short_conv"},), 24, 512, 1024),
    "hydra": Row("Hydra attention, cosine kernel", ({"name": "hydra"},), 24, 512, 1024),
    "multihead_linear": Row(
        "linear attention with Hydra's kernel, 8 heads", ({"name": "multihead_linear", "heads": 8},), 24, 512, 1024
    ),
    "external": Row("external attention, 64 slots", ({"name": "external", "slots": 64},), 24, 512, 1024),
    "external_multihead": Row(
        "external attention as in EAMLP, 8 heads widened 4 times",
        ({"name": "external_multihead", "heads": 8},),
        24,
        512,
        1024,
    ),
    "linear": Row("linear attention, elu + 1", ({"name": "linear", "heads": 8},), 24, 512, 1024),
    "performer": Row("Performer, positive orthogonal features", ({"name": "performer", "heads": 8},), 24, 512, 1024),
    "rfa": Row("random feature attention with gates", ({"name": "rfa", "heads": 8, "gate": True},), 24, 512, 1024),
    "synthesizer_dense": Row("Synthesizer, dense", ({"name": "synthesizer_dense", "heads": 8},), 24, 512, 1024),
    "synthesizer_random": Row("Synthesizer, random", ({"name": "synthesizer_random", "heads": 8},), 24, 512, 1024),
    "synthesizer_factorized_dense": Row(
        "Synthesizer, factorised dense", ({"name": "synthesizer_factorized_dense", "heads": 8},), 24, 512, 1024
    ),
    "synthesizer_factorized_random": Row(
        "Synthesizer, factorised random", ({"name": "synthesizer_factorized_random", "heads": 8},), 24, 512, 1024
    ),
    "synthesizer_mixture": Row(
        "Synthesizer, random + dot products", ({"name": "synthesizer_mixture", "heads": 8},), 24, 512, 1024
    ),
    "local": Row(
        "softmax attention in a window of 128", ({"name": "local", "window": 128, "heads": 8},), 24, 512, 1024
    ),
    "hybrid": Row("three AFT-local layers, then one of attention", (LOCAL, LOCAL, LOCAL, ATTENTION), 24, 512, 1024),
    "hybrid_forget": Row(
        "two AFT-forget layers, then one of attention", ({"name": "aft_forget"},) * 2 + (ATTENTION,), 24, 512, 1024
    ),
    "hybrid_delta_3": Row(
        "three Gated DeltaNet layers, then one of attention", (DELTA,) * 3 + (ATTENTION,), 24, 512, 1024
    ),
    "hybrid_delta_7": Row(
        "seven Gated DeltaNet layers, then one of attention", (DELTA,) * 7 + (ATTENTION,), 24, 512, 1024
    ),
}


def build(row: Row, size: str) -> RunConfig:
    """Return the config of a row at a size.

    It is 4 layers x 128 for about a minute on a CPU (one of each kind, where there are more), 8 x 384 on one GPU, or
    24 x 512.
    """
    if size == "smoke":
        mixers = tuple(shrink_spec(spec, seq_len=256, heads=4, rank=32) for spec in row.mixers)
        model = LMConfig(dim=128, max_len=256, mixers=mixers, layers=max(4, len(mixers)))
        loop = TrainConfig(steps=200, batch_size=8, eval_every=100, save_every=50, eval_bytes=20_000, sample_bytes=128)
        return RunConfig(model, DataConfig(seq_len=256), OptimConfig(lr=3e-3, warmup=50), loop)
    if size == "gpu":
        mixers = tuple(shrink_spec(spec, seq_len=1024, heads=6, rank=64) for spec in row.mixers)
        model = LMConfig(dim=384, max_len=1024, mixers=mixers, layers=8, dropout=0.1)
        loop = TrainConfig(
            steps=10_000,
            batch_size=32,
            precision="bf16",
            log_every=50,
            eval_every=1000,
            save_every=1000,
            sample_bytes=512,
            eval_bytes=500_000,
        )
        return RunConfig(model, DataConfig(seq_len=1024), OptimConfig(lr=1e-3, warmup=500), loop)
    model = LMConfig(dim=row.dim, max_len=row.seq_len, mixers=row.mixers, layers=row.layers, dropout=0.1)
    loop = TrainConfig(
        steps=100_000,
        batch_size=64,
        accumulate=2,
        precision="bf16",
        log_every=100,
        eval_every=5000,
        save_every=1000,
        sample_bytes=512,
    )
    return RunConfig(model, DataConfig(seq_len=row.seq_len), OptimConfig(lr=6e-4, warmup=2000), loop)


RECIPE = Recipe(
    "text", "a byte language model on any text, one row for each mixer of the core", ROWS, "aft_local", build
)
