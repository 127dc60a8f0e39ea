"""Measure known defects of public token mixers now, theirs and ours side by side.

    python benchmarks/peer_defects.py [--json FILE]

Packages of the dev group run here. Projects that are not packages are quoted: our measurements of them from November
2026 stand in quotation marks. ``ours`` is always measured here; ``tests/test_peers.py`` requires that it passes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenmix import MixerError, build_mixer, functional

D, T, PAST = 64, 64, 40
LIMIT = 1e-6  # what may change where nothing may


class Defect(NamedTuple):
    """Describe one defect: what is measured, on whom, and what is right."""

    what: str
    who: str
    theirs: Callable[[], Any] | None
    ours: Callable[[], Any]
    right: Callable[[Any], bool]


def small(value: Any) -> bool:
    """Return whether a number that must vanish is within the limit."""
    return isinstance(value, float) and value <= LIMIT


def no(value: Any) -> bool:
    """Return whether the count is zero."""
    return value == 0


def yes(value: Any) -> bool:
    """Return whether it works."""
    return value is True or value == "works"


def mixer(name: str, *, seed: int = 0, **options: Any) -> nn.Module:
    """Build one of our mixers, seeded and in eval mode.

    Every parameter gets noise, so that none stays at an initial value at which it does nothing.
    """
    torch.manual_seed(seed)
    built = build_mixer(name, D, **options).eval()
    with torch.no_grad():
        for p in built.parameters():
            if p.is_floating_point():
                p.add_(0.1 * torch.randn_like(p))
    return built


def noise(*shape: int, seed: int = 1) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def leak(f: Callable[[Tensor], Tensor], *sizes: float) -> float:
    """Return the largest relative change of the past, in norm, when numbers of these sizes replace the future."""
    x, worst = noise(1, T, D), 0.0
    for size in sizes or (1.0, 1e4):
        other = x.clone()
        other[:, PAST:] = size * noise(1, T - PAST, D, seed=2)
        with torch.no_grad():
            a, b = f(x)[:, :PAST], f(other)[:, :PAST]
        worst = max(worst, float((a - b).norm() / a.norm()))
    return worst


def padding(f: Callable[[Tensor, Tensor | None], Tensor]) -> float:
    """Return the relative change of the real outputs when large masked tokens pad the row at the right."""
    x = noise(1, PAST, D)
    long = torch.cat([x, 100 * noise(1, T - PAST, D, seed=2)], 1)
    with torch.no_grad():
        a, b = f(x, None), f(long, (torch.arange(T) < PAST)[None])[:, :PAST]
    return float((a - b).norm() / a.norm())


def masked(name: str, **options: Any) -> float:
    """Return ``padding`` of one of our mixers."""
    ours = mixer(name, **options)
    return padding(lambda x, mask: ours(x, key_mask=mask))


def coupling(f: Callable[[Tensor], Tensor]) -> float:
    """Return the relative change of the first row when the others are scaled."""
    x = noise(3, T, D)
    other = torch.cat([x[:1], 30 * x[1:]])
    with torch.no_grad():
        a, b = f(x)[:1], f(other)[:1]
    return float((a - b).norm() / a.norm())


def broken(values: Tensor) -> int:
    """Count the numbers that are not finite."""
    return int((~values.isfinite()).sum())


def outcome(f: Callable[[], Any]) -> str:
    """Return "works", or the error's name and first words."""
    try:
        f()
    except Exception as why:
        return f"{type(why).__name__}: {str(why).splitlines()[0][:60] if str(why) else ''}"
    return "works"


def moved(layer: nn.Module, name: str, run: Callable[[], Tensor]) -> float:
    """Return how far one step of SGD moves the parameter that the optimiser knows by this name."""
    known = dict(layer.named_parameters())[name]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = known.detach().clone()
    run().square().sum().backward()
    optimizer.step()
    return float((known - before).abs().max())


# --- AFT --------------------------------------------------------------------------------------------------------------


def their_aft(kind: str, key: float, dtype: torch.dtype = torch.float32) -> int:
    """Count the numbers that are not finite in their AFT with every key at about this value."""
    import aft_pytorch

    torch.manual_seed(0)
    layer = getattr(aft_pytorch, kind)(max_seqlen=16, dim=D, hidden_dim=D)
    with torch.no_grad():
        layer.to_k.weight.zero_()
        layer.to_k.bias.fill_(key)
        return broken(layer.to(dtype)(noise(1, 16, D).to(dtype)))


def our_aft(name: str, key: float, dtype: torch.dtype = torch.float32) -> int:
    """Count the numbers that are not finite in our AFT with every key at about this value."""
    layer = mixer(name, **({} if name == "aft_simple" else {"max_len": 16}))
    with torch.no_grad():
        layer.k_proj.weight.zero_()
        layer.k_proj.bias.fill_(key)
        return broken(layer.to(dtype)(noise(1, 16, D).to(dtype)))


def their_aft_leak() -> float:
    import aft_pytorch

    torch.manual_seed(0)
    return leak(aft_pytorch.AFTFull(max_seqlen=T, dim=D).eval(), 1.0)


def their_local_training() -> float:
    import aft_pytorch

    torch.manual_seed(0)
    layer = aft_pytorch.AFTLocal(max_seqlen=16, dim=D, s=4)
    return moved(layer, "wbias", lambda: layer(noise(1, 16, D)))


def our_local_training() -> float:
    layer = mixer("aft_local", max_len=16, window=4, rank=None)
    return moved(layer, "bias.weight", lambda: layer(noise(1, 16, D)))


def their_local_compiles() -> str:
    import aft_pytorch

    layer = aft_pytorch.AFTLocal(max_seqlen=16, dim=D, s=4)
    torch.compiler.reset()
    return outcome(lambda: torch.compile(layer, backend="eager", fullgraph=True)(noise(1, 16, D)))


def our_local_compiles() -> str:
    layer = mixer("aft_local", max_len=16, window=4)
    torch.compiler.reset()
    return outcome(lambda: torch.compile(layer, backend="eager", fullgraph=True)(noise(1, 16, D)))


def their_conv() -> str:
    from aft_pytorch.aft_pytorch import AFTConv

    return outcome(lambda: AFTConv()(noise(1, 16, D)))


def first_output_error() -> float:
    """Compare the first causal output with sigmoid(q_0) v_0, for a token is never counted twice."""
    q, k, v = (noise(1, 8, 4, seed=s) for s in range(3))
    return float((functional.aft_simple(q, k, v, causal=True)[:, 0] - torch.sigmoid(q[:, 0]) * v[:, 0]).abs().max())


def conv_is_local_full() -> float:
    """Compare AFT-conv with AFT-full that has the same local bias and shared keys."""
    q, v, k, kernel = noise(1, 16, 8), noise(1, 16, 8, seed=2), noise(1, 16, 1, seed=3), noise(1, 5, seed=4)
    offset = torch.arange(16)[None] - torch.arange(16)[:, None]
    w = torch.where(offset.abs() <= 2, kernel[0][(offset + 2).clamp(0, 4)], 0.0)
    want = functional.aft_full(q, k.expand(-1, -1, 8), v, w)
    return float((functional.aft_conv(q, k, v, kernel) - want).abs().max() / want.abs().max())


def simple_is_ratio_of_prefixes() -> float:
    """Compare causal AFT-simple with softmax over each prefix."""
    q, k, v = (noise(1, 12, 4, seed=s).double() for s in range(3))
    rows = [(k[:, : t + 1].softmax(1) * v[:, : t + 1]).sum(1) for t in range(12)]
    want = torch.sigmoid(q) * torch.stack(rows, 1)
    return float((functional.aft_simple(q, k, v, causal=True) - want).abs().max() / want.abs().max())


def full_adds_the_bias() -> float:
    """Compare AFT-full with exp(K + w), written out."""
    q, k, v, w = noise(1, 6, 4), noise(1, 6, 4, seed=2), noise(1, 6, 4, seed=3), noise(6, 6, seed=4)
    weight = torch.exp(k[:, None] + w[None, :, :, None])
    want = torch.sigmoid(q) * (weight * v[:, None]).sum(2) / weight.sum(2)
    return float((functional.aft_full(q, k, v, w) - want).abs().max() / want.abs().max())


# --- Hydra, External, Synthesizer -------------------------------------------------------------------------------------


def zero_token(name: str, **options: Any) -> int:
    """Count the numbers that are not finite, gradients included, with one token all zero and no biases."""
    layer = mixer(name, qkv_bias=False, out_bias=False, **options)
    x = noise(1, 16, D)
    x[:, 3] = 0
    x.requires_grad_()
    y = layer(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return broken(y) + broken(grad)


def external_range(dtype: torch.dtype) -> int:
    """Count the numbers that are not finite when one token's logits span thousands."""
    layer = mixer("external").to(dtype)
    x = noise(1, 16, D)
    x[:, 3] *= 1e3
    with torch.no_grad():
        return broken(layer(x.to(dtype)))


def tied_memory_storage() -> bool:
    """Check that tied memories are one parameter, and stay one in a deep copy or another dtype."""
    layer = mixer("external", tied=True).double()
    return sum("memory" in name for name, _ in layer.named_parameters()) == 1


def distinct_logits(N: int) -> float:
    """Return the share of distinct logits in a row of the factorised dense Synthesizer.

    The logits are read off its weights.
    """
    from tokenmix.lab.report.pictures import effective_attention

    layer = mixer("synthesizer_factorized_dense", max_len=N, heads=1).double()
    row = effective_attention(layer, noise(1, N, D).double()).weights[0, 0]
    return len(torch.unique(row.log().round(decimals=9))) / N


def random_learns() -> float:
    layer = mixer("synthesizer_random", max_len=16)
    name = next(n for n, p in layer.named_parameters() if "proj" not in n)
    return moved(layer, name, lambda: layer(noise(1, 16, D)))


def random_saved() -> bool:
    return any("proj" not in name for name in mixer("synthesizer_random", max_len=16).state_dict())


def flat_start(name: str) -> float:
    """Return a new row's largest weight over the uniform weight: 1 is flat, N is one-hot."""
    from tokenmix.lab.report.pictures import effective_attention

    torch.manual_seed(0)
    layer = build_mixer(name, D, max_len=128).eval()
    return float(effective_attention(layer, noise(1, 128, D)).weights.amax(-1).mean() * 128)


# --- the classic ones -------------------------------------------------------------------------------------------------


def their_performer() -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        from performer_pytorch import SelfAttention

    torch.manual_seed(0)
    return leak(SelfAttention(D, heads=4, causal=True, dim_head=16, nb_features=32).eval(), 10.0)


def their_reformer() -> float:
    from reformer_pytorch import LSHSelfAttention

    torch.manual_seed(0)
    layer = LSHSelfAttention(D, heads=4, bucket_size=8, n_hashes=4, causal=True).eval()

    def run(x: Tensor) -> Tensor:
        torch.manual_seed(5)  # it draws its hashes anew in each call
        return layer(x)

    return leak(run, 1.0)


def their_reformer_length() -> str:
    from reformer_pytorch import LSHSelfAttention

    return outcome(lambda: LSHSelfAttention(D, heads=4, bucket_size=8, causal=True)(noise(1, 60, D)))


def their_routing() -> float:
    from routing_transformer import RoutingTransformer

    torch.manual_seed(0)
    model = RoutingTransformer(
        dim=D, depth=1, max_seq_len=T, heads=4, causal=True, window_size=16, reversible=False, n_local_attn_heads=0
    )
    model(noise(2, T, D))  # places the centroids
    model.eval()
    return leak(lambda x: model(x)[0], 1.0)


def their_linformer_padding() -> float:
    from linformer import LinformerSelfAttention

    torch.manual_seed(0)
    layer = LinformerSelfAttention(D, seq_len=T, k=16, heads=4).eval()
    return padding(lambda x, mask: layer(x, mask=mask))


def their_nystrom(measure: str) -> float:
    from nystrom_attention import NystromAttention

    torch.manual_seed(0)
    layer = NystromAttention(dim=D, dim_head=16, heads=4, num_landmarks=8, residual=False).eval()
    return coupling(layer) if measure == "rows" else padding(lambda x, mask: layer(x, mask=mask))


def ours_leaks(name: str, **options: Any) -> Callable[[], float]:
    """Return ``leak`` of one of our mixers, at sizes 1 and 1e4."""
    return lambda: leak(mixer(name, causal=True, **options))


def refuses_causal(name: str, **options: Any) -> str:
    """Return whether asking for a causal form that cannot exist is refused."""
    try:
        build_mixer(name, D, causal=True, **options)
    except MixerError:
        return "refused"
    return "accepted"


FP16 = torch.float16
DEFECTS = [
    Defect(
        "AFT-full, keys of 100, float32: numbers not finite",
        "aft-pytorch 0.2.2",
        lambda: their_aft("AFTFull", 100.0),
        lambda: our_aft("aft_full", 100.0),
        no,
    ),
    Defect(
        "AFT-full, keys of -120, float32: numbers not finite",
        "aft-pytorch 0.2.2",
        lambda: their_aft("AFTFull", -120.0),
        lambda: our_aft("aft_full", -120.0),
        no,
    ),
    Defect(
        "AFT-full, keys of 12, float16: numbers not finite",
        "aft-pytorch 0.2.2",
        lambda: their_aft("AFTFull", 12.0, FP16),
        lambda: our_aft("aft_full", 12.0, FP16),
        no,
    ),
    Defect(
        "AFT-full, keys of 1e4, float16: numbers not finite",
        "aft-pytorch 0.2.2",
        lambda: their_aft("AFTFull", 1e4, FP16),
        lambda: our_aft("aft_full", 1e4, FP16),
        no,
    ),
    Defect(
        "AFT-full: the last tokens change earlier outputs by",
        "aft-pytorch 0.2.2 (no causal form)",
        their_aft_leak,
        ours_leaks("aft_full", max_len=T),
        small,
    ),
    Defect(
        "AFT-local: one step moves the bias by",
        "aft-pytorch 0.2.2",
        their_local_training,
        our_local_training,
        lambda v: v > 1e-6,
    ),
    Defect(
        "AFT-local: torch.compile(fullgraph=True)", "aft-pytorch 0.2.2", their_local_compiles, our_local_compiles, yes
    ),
    Defect(
        "AFT-conv",
        "aft-pytorch 0.2.2",
        their_conv,
        lambda: outcome(lambda: mixer("aft_conv", heads=4, kernel_size=3)(noise(1, 16, D))),
        yes,
    ),
    Defect(
        "AFT-local, causal: one large future key makes the past",
        '"labml: NaN (fp32 110, fp16 18)"',
        None,
        ours_leaks("aft_local", max_len=T, window=8),
        small,
    ),
    Defect(
        "AFT-local: padding changes real outputs by",
        '"labml: TypeError without a mask, NaN in masked rows"',
        None,
        lambda: masked("aft_local", max_len=T, window=8),
        small,
    ),
    Defect(
        "AFT-full: error against exp(K + w)",
        '"idiap fast-transformers: 0.60, it is exp(K w)"',
        None,
        full_adds_the_bias,
        lambda v: v < 1e-5,
    ),
    Defect(
        "AFT-simple, causal: error against the ratio of prefix sums",
        '"idiap fast-transformers: 1.50"',
        None,
        simple_is_ratio_of_prefixes,
        lambda v: v < 1e-9,
    ),
    Defect(
        "AFT-conv: error against AFT-full with the same bias",
        '"ComVEX: 0.44, it convolves K, not exp(K)"',
        None,
        conv_is_local_full,
        lambda v: v < 1e-5,
    ),
    Defect(
        "AFT, causal: error of the first output",
        '"torch_aft: the current token counts twice"',
        None,
        first_output_error,
        lambda v: v < 1e-6,
    ),
    Defect(
        "AFT-full: a length other than max_len",
        '"xmu: RuntimeError"',
        None,
        lambda: outcome(lambda: mixer("aft_full", max_len=49)(noise(1, 16, D))),
        yes,
    ),
    Defect(
        "Hydra: one zero token, numbers not finite",
        '"hydra-linear-attention: every output"',
        None,
        lambda: zero_token("hydra"),
        no,
    ),
    Defect(
        "Hydra: the last tokens change earlier outputs by",
        '"hydra-linear-attention: 0.085 (no causal form)"',
        None,
        ours_leaks("hydra"),
        small,
    ),
    Defect(
        "Hydra: padding changes real outputs by",
        '"hydra-linear-attention: masks keys only"',
        None,
        lambda: masked("hydra"),
        small,
    ),
    Defect(
        "External: logits over thousands, float32, numbers not finite",
        '"xmu: NaN from a range of 240"',
        None,
        lambda: external_range(torch.float32),
        no,
    ),
    Defect(
        "External: the same in float16",
        '"xmu: NaN from a range of 19; EANet: 1e-9 is 0"',
        None,
        lambda: external_range(FP16),
        no,
    ),
    Defect("External: padding changes real outputs by", '"xmu: 15 %"', None, lambda: masked("external"), small),
    Defect(
        "External: the last tokens change earlier outputs by",
        '"xmu: 0.46 (no causal form)"',
        None,
        ours_leaks("external"),
        small,
    ),
    Defect(
        "External: tied memories are one parameter",
        '"EANet: two parameters on one storage"',
        None,
        tied_memory_storage,
        yes,
    ),
    Defect(
        "Synthesizer, factorised dense: share of distinct logits, N = 32",
        '"leaderj1001: 0.25"',
        None,
        lambda: distinct_logits(32),
        lambda v: v == 1.0,
    ),
    Defect(
        "Synthesizer, factorised dense: share of distinct logits, N = 197",
        '"WhatTransformerToFavor: 0.14"',
        None,
        lambda: distinct_logits(197),
        lambda v: v == 1.0,
    ),
    Defect(
        "Synthesizer, random: one step moves R by",
        '"10-zin: 0, R is no parameter"',
        None,
        random_learns,
        lambda v: v > 1e-9,
    ),
    Defect("Synthesizer, random: R is in the state_dict", '"10-zin: no"', None, random_saved, yes),
    Defect(
        "Synthesizer, factorised random: largest weight over uniform at the start",
        '"WhatTransformerToFavor: 42 of 128"',
        None,
        lambda: flat_start("synthesizer_factorized_random"),
        lambda v: v < 3,
    ),
    Defect(
        "Performer, causal: the future changes the past by",
        "performer-pytorch 1.1.4",
        their_performer,
        ours_leaks("performer"),
        small,
    ),
    Defect(
        "Reformer, causal: the future changes the past by",
        "reformer-pytorch 1.4.4",
        their_reformer,
        ours_leaks("reformer"),
        small,
    ),
    Defect(
        "Reformer: a length of 60",
        "reformer-pytorch 1.4.4",
        their_reformer_length,
        lambda: outcome(lambda: mixer("reformer", causal=True)(noise(1, 60, D))),
        yes,
    ),
    Defect(
        "Routing, causal: the future changes the past by",
        "routing-transformer 1.6.1",
        their_routing,
        ours_leaks("routing"),
        small,
    ),
    Defect(
        "BigBird, causal: the future changes the past by",
        '"transformers 5.23.0 block_sparse decoder: 14 %"',
        None,
        ours_leaks("bigbird"),
        small,
    ),
    Defect("Sinkhorn, causal: the future changes the past by", None, "", ours_leaks("sinkhorn"), small),
    Defect(
        "Linformer: masked padding changes real outputs by",
        "linformer 0.2.3",
        their_linformer_padding,
        lambda: masked("linformer", max_len=T),
        small,
    ),
    Defect(
        "Linformer: causal, which it cannot be",
        '"linformer: TypeError"',
        None,
        lambda: refuses_causal("linformer", max_len=T),
        lambda v: v == "refused",
    ),
    Defect(
        "Nystrom: other rows of the batch change a row by",
        "nystrom-attention 0.0.14",
        lambda: their_nystrom("rows"),
        lambda: coupling(mixer("nystrom")),
        small,
    ),
    Defect(
        "Nystrom: padding changes real outputs by",
        "nystrom-attention 0.0.14",
        lambda: their_nystrom("padding"),
        lambda: masked("nystrom"),
        small,
    ),
]


def shown(value: Any) -> str:
    """Return a measurement in a few characters."""
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def measure(defect: Defect) -> dict[str, Any]:
    """Measure both sides of one defect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = defect.theirs() if defect.theirs else None
        ours = defect.ours()
    return {
        "defect": defect.what,
        "who": defect.who,
        "theirs": theirs,
        "ours": ours,
        "ours_is_right": bool(defect.right(ours)),
    }


def main() -> None:
    """Print the table; exit with 1 where ours is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=str)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(d) for d in DEFECTS]
    for r in rows:
        theirs = f"{shown(r['theirs'])} ({r['who']})" if r["theirs"] is not None else r["who"] or "not run"
        print(
            f"{r['defect']}\n    theirs  {theirs}\n"
            f"    ours    {shown(r['ours'])}{'' if r['ours_is_right'] else '   WRONG'}"
        )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    raise SystemExit(0 if all(r["ours_is_right"] for r in rows) else 1)


if __name__ == "__main__":
    main()
