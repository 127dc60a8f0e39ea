"""Plant bugs in the C kernels: each is a patch to a source and a check that must notice it.

The check must notice it by comparison; a crash does not count. Run as a script this makes checks on the library named
by TOKENMIX_LIBRARY and prints the results as JSON; ``test_kernel_mutations.py`` does so in a fresh process. A new
kernel adds rows to ``BUGS`` and, where calls of ``fuzz_forms`` cannot show a bug, a check to ``CHECKS``.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fuzz_forms import check
from kernel_checks import both, worst
from nonfinite_checks import FORMS as POISONED
from nonfinite_checks import check_all, check_stream
from test_kernels_extend import FORMS as EXTENDED
from test_kernels_extend import close, drawn, eagerly, found, past
from tokenmix import functional, use_backend
from tokenmix.functional.short_conv import short_conv_chunk
from tokenmix.kernels import cpu
from tokenmix.kernels.tokenwise import rms_norm, rotate, silu_gate
from tokenmix.mixers import build_mixer


class Bug(NamedTuple):
    """Replace ``old`` by ``new``, ``times`` times, in one file of kernels/cpu/src.

    ``check`` must then fail: a name of CHECKS, or of fuzz_forms.FORMS.
    """

    name: str
    file: str
    old: str
    new: str
    check: str
    quick: bool = False
    times: int = 1


SEEDS = 60


def drift() -> None:
    """A long sum of equal terms stays what it is."""
    v = torch.full((1, 20_000, 3), 0.1)
    off = float(
        (functional.aft_simple(v, torch.zeros_like(v), v, causal=True, gate=None, backend="cpu") - 0.1).abs().max()
    )
    assert off < 1e-6, f"off by {off:.1e}"


def drift_backward() -> None:
    """The same for the gradient of the first value, a long sum of nearly equal terms."""
    v = torch.full((1, 20_000, 2), 0.1)
    k = torch.zeros_like(v)
    k[:, 0] = 20.0  # the first token weighs most at all times
    grads = []
    for dtype, backend in ((torch.float32, "cpu"), (torch.float64, "eager")):
        leaf = v.to(dtype).requires_grad_()
        y = functional.aft_simple(leaf, k.to(dtype), leaf, causal=True, gate=None, backend=backend)
        grads.append(torch.autograd.grad(y.sum(), leaf)[0].double())
    off = float(((grads[0] - grads[1]).abs() / grads[1].abs().max()).max())
    assert off < 3e-6, f"off by {off:.1e}"


def fading() -> None:
    """A large key that fades for as long as others join: what rounds in the sum of decays would show in its weight."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 400, 4, generator=draw) for _ in range(2))
    k[:, 0] = 100.0

    def run(k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, backend: str) -> torch.Tensor:
        return functional.aft_forget(v, k, v, decay, causal=True, gate=None, backend=backend)

    off = worst(both(run, (k, v, torch.full_like(k, -0.37)), {}))
    assert off < 1e-5, f"off by {off:.1e}"


def strips() -> None:
    """Heads that do not divide the width of a strip, on several of them."""
    args = tuple(torch.randn(1, 9, 1110, generator=torch.Generator().manual_seed(i)) for i in range(4))

    def run(*args: torch.Tensor, backend: str) -> torch.Tensor:
        return functional.aft_forget(*args[:3], -args[3].exp(), causal=True, heads=30, backend=backend)

    off = worst(both(run, args, {}))
    assert off < 1e-5, f"off by {off:.1e}"


def drift_over_all() -> None:
    """The same over all keys, forward and backward."""
    v = torch.full((1, 20_000, 2), 0.1).requires_grad_()
    y = functional.aft_simple(v, torch.zeros_like(v), v, gate=None, backend="cpu")
    (grad,) = torch.autograd.grad((y * 0.1).sum(), v)
    off = max(float((y - 0.1).abs().max()), float((grad - 0.1).abs().max()))
    assert off < 2e-6, f"off by {off:.1e}"


def borders() -> None:
    """Lengths about a whole number of chunks, in a batch of rows."""
    for T in (63, 64, 65, 127, 128, 129, 300):
        args = tuple(torch.randn(3, T, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))
        off = worst(both(functional.aft_simple, args, {"causal": True}))
        assert off < 1e-5, f"T={T}: off by {off:.1e}"


def tokenwise() -> None:
    """RMS norm, rotary positions and the gate of a SwiGLU over rows that end inside a block."""
    draw = torch.Generator().manual_seed(0)
    x, y = (3 * torch.randn(2, 70, 38, generator=draw) for _ in range(2))
    weight, angles = torch.randn(38, generator=draw), torch.randn(2, 70, 9, generator=draw)

    def turned(x: torch.Tensor, backend: str) -> torch.Tensor:
        wide = angles.to(x.dtype)
        return rotate(x.unflatten(-1, (2, 19)), wide.cos(), wide.sin(), backend=backend)

    calls: list[tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = [
        (rms_norm, (x, weight)),
        (silu_gate, (x, y)),
        (turned, (x,)),
    ]
    for form, args in calls:
        off = worst(both(form, args, {}))
        assert off < 1e-5, f"{form.__name__}: off by {off:.1e}"


def convolution() -> None:
    """New tokens of a short convolution after padding, with gaps between their positions, against the eager form."""
    draw = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 9, 70, generator=draw), torch.randn(70, 4, generator=draw)
    at, valid = torch.randint(1, 3, (2, 9), generator=draw).cumsum(1), torch.arange(9).expand(2, 9) >= 2
    past, new = ([a[:, part].contiguous() for a in (x, valid, at)] for part in (slice(3), slice(3, 9)))
    found = []
    for backend in ("eager", "auto"):
        with use_backend(backend):
            y, kept = short_conv_chunk(new[0], weight, new[1], new[2], (past[0], past[1], past[2]))
            found.append([y, *kept])
    off = max(float((a.double() - b.double()).abs().max()) for a, b in zip(*found, strict=True))
    assert off < 1e-5, f"off by {off:.1e}"


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "aft_simple": ("aft_simple", {}),
    "aft_local": ("aft_local", {"window": 9, "max_len": 300, "init_std": 0.5}),
    "aft_local wide": ("aft_local", {"window": 100, "max_len": 300, "init_std": 0.5}),
    "aft_conv": ("aft_conv", {"heads": 4, "kernel_size": 7, "reparam": False, "init_std": 1.0}),
    "aft_full": ("aft_full", {"max_len": 300, "init_std": 0.5}),
    "aft_forget": ("aft_forget", {"key_norm": False, "kernel_size": 1}),
    "aft_pairs": (
        "aft_pairs",
        {"heads": 4, "rank": 3, "norm": False, "key_norm": False, "kernel_size": 1},
    ),
    "hydra": ("hydra", {}),
    "hydra mean": ("hydra", {"feature": "mean"}),
    "linear": ("linear", {"heads": 4}),
}


def decoded(row: str) -> None:
    """Compare a stream with the parallel form in float64, on any library that has the steps.

    The stream comes token by token and in chunks, with masked tokens.
    """
    name, options = STREAMS[row]
    T, D, draw = 290, 72, torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    mixer = build_mixer(name, D, causal=True, **options).requires_grad_(False)
    x, mask, outputs, state, at = (
        3 * torch.randn(2, T, D, generator=draw),
        torch.rand(2, T, generator=draw) < 0.8,
        [],
        mixer.init_state(2),
        0,
    )
    for n in (1, 5, 1, 1, *[8] * 33, *[1] * 18):
        y, state = mixer.extend(x[:, at : at + n], state, key_mask=mask[:, at : at + n])
        outputs.append(y)
        at += n
    with use_backend("eager"):
        want = mixer.double()(x.double(), key_mask=mask)[mask]
    off = float((torch.cat(outputs, 1)[mask] - want).abs().max() / want.abs().max())
    assert off < 1e-5, f"{row}: off by {off:.1e}"


def extended(form: str) -> None:
    """New tokens of a stream, with the gradients of the sums before and after them."""
    run = EXTENDED[form]
    close(found(run, drawn(torch.float32), past(form)), found(eagerly(run), drawn(torch.float64), past(form)), 4e-6)


CHECKS: dict[str, Callable[[], None]] = {
    f.__name__: f for f in (drift, drift_backward, strips, drift_over_all, fading, borders, tokenwise, convolution)
}
CHECKS |= {f"extended {form}": functools.partial(extended, form) for form in EXTENDED}
CHECKS |= {f"decode {row}": functools.partial(decoded, row) for row in STREAMS}

SCAN, FADE, NORM, LINEAR = "aft_simple", "aft_forget", "aft_forget norm", "linear_attention"
PAIRS = "aft_pairs"
MASKED = "if (mask && !mask[t])"
BUGS = [
    Bug(
        "the two levels of sums are one",
        "aft_simple.c",
        "        scan_fold(s, w);\n    }\n}\n\nTM_INLINE void scan_start",
        "    }\n}\n\nTM_INLINE void scan_start",
        "drift",
        True,
    ),
    Bug("decays add up to nothing", "aft_forget.c", "more = (dd) + s->r[c]", "more = s->r[c]", FADE, True),
    Bug(
        "a new unit keeps what rounding took from the old one",
        "aft_forget.c",
        "s->r[c] = up ? bias : rr",
        "s->r[c] = rr",
        FADE,
    ),
    Bug(
        "what rounding takes from decays is lost", "aft_forget.c", "rr = more - (uu - s->u[c]);", "rr = 0.0f;", "fading"
    ),
    Bug("the unit never rises", "aft_forget.c", "int up = above > 0;", "int up = above > 0 && s->u[c] < -1e30f;", FADE),
    Bug(
        "the denominator has no part in the gradient of decays",
        "aft_forget.c",
        "n * rest - d * past;",
        "n * rest;",
        FADE,
        True,
    ),
    Bug(
        "the gradient of the sums after the tokens is lost",
        "aft_simple.c",
        "r->tr[c] = gn ? gn[at + c] : 0.0",
        "r->tr[c] = 0.0",
        "extended aft_simple",
    ),
    Bug(
        "the gradient of the sums before the tokens is that of those after the first",
        "aft_simple.c",
        "dn[at + c] = r->tr[c] * r->shrink[c]",
        "dn[at + c] = r->tr[c]",
        "extended aft_simple",
    ),
    Bug(
        "masked tokens count and decay",
        "aft_forget.c",
        MASKED + "\n                fade_look",
        "if (0)\n                fade_look",
        FADE,
    ),
    Bug(
        "masked tokens count in the replay of decays",
        "aft_forget.c",
        "if (a->mask && !a->mask[b * a->T + t]) {",
        "if (0) {",
        FADE,
    ),
    Bug(
        "a chunk starts in another unit",
        "aft_forget.c",
        "s.u[c] = p[c], s.r[c]",
        "s.u[c] = 0.0f, s.r[c]",
        "fading",
    ),
    Bug(
        "the state forgets its unit",
        "aft_forget.c",
        "(double)s.u[c] + s.r[c]",
        "0.0",
        "decode aft_forget",
    ),
    Bug(
        "the ratio is not normalised",
        "aft_forget.c",
        "y[c] *= scales[h];",
        ";",
        NORM,
        True,
    ),
    Bug(
        "the gradient of the norm is that of a constant",
        "aft_forget.c",
        "(gr[c] - yy[c] * along) * scale",
        "gr[c] * scale",
        NORM,
    ),
    Bug(
        "dq of a decayed ratio without the derivative of the gate",
        "aft_forget.c",
        "* open * (e1 * open);",
        "* open;",
        FADE,
    ),
    Bug(
        "dq of a decayed ratio without its norm",
        "aft_forget.c",
        "dq[c] * (yy[c] * scale)",
        "dq[c] * yy[c]",
        NORM,
    ),
    Bug(
        "an infinite ratio makes its head 0",
        "aft_forget.c",
        "squares[h] < INFINITY ?",
        "1 ?",
        "nonfinite aft_forget norm",
    ),
    Bug(
        "an infinite key leaves finite gradients",
        "aft_forget.c",
        " + (new - new);",
        ";",
        "nonfinite aft_forget",
        times=2,
    ),
    Bug(
        "an infinite decay forgets all",
        "aft_forget.c",
        "rr = uu < FADE_LEAST ? 0.0f : rr,",
        "rr = fabsf(uu) > 1e38f ? 0.0f : rr,",
        "nonfinite aft_forget",
    ),
    Bug(
        "the first sum's unit is the largest",
        "aft_pairs.c",
        "(aa - o->ta[c]) > 0;",
        "(aa - o->ta[c]) > 1e38f;",
        PAIRS,
        True,
    ),
    Bug(
        "logits of queries do not count",
        "aft_pairs.c",
        "float *restrict wt = o->wt + i * w, aa = a[i];",
        "float *restrict wt = o->wt + i * w, aa = a[0];",
        PAIRS,
    ),
    Bug("logits of keys do not count", "aft_pairs.c", "b ? b[h * p->R + i] : 0.0f, g ?", "0.0f, g ?", PAIRS),
    Bug(
        "the gradient of a query's logit forgets the mean",
        "aft_pairs.c",
        "gg * (num[c] - yy[c] * den[c])",
        "gg * num[c]",
        PAIRS,
    ),
    Bug(
        "the gradient of a key's logit is that of one sum",
        "aft_pairs.c",
        "dk[c] += own, sb[c] = own;",
        "dk[c] = own, sb[c] = own;",
        PAIRS,
    ),
    Bug(
        "sums of later tokens do not shrink with the unit",
        "aft_pairs.c",
        "rs[c] = up ? e : d_[c] == 0 ? 0.0f : 1.0f;",
        "rs[c] = 1.0f;",
        PAIRS,
    ),
    Bug(
        "masked tokens count in the replay of pairs",
        "aft_pairs.c",
        "if (in->mask && !in->mask[b * in->T + t]) {",
        "if (0) {",
        PAIRS,
    ),
    Bug("the state of pairs forgets its units", "aft_pairs.c", "(double)s.u[at] + s.r[at]", "0.0", "decode aft_pairs"),
    Bug("the maximum follows the last key", "aft_simple.c", "s->m[c] = up ? kk : mm;", "s->m[c] = kk;", SCAN, True),
    Bug("the maximum never rises", "aft_simple.c", "int up = (kk) > mm;", "int up = (kk) > mm && mm < -1e30f;", SCAN),
    Bug(
        "masked tokens count",
        "aft_simple.c",
        MASKED + "\n                scan_look",
        "if (0)\n                scan_look",
        SCAN,
        True,
    ),
    Bug(
        "masked tokens count over all keys",
        "aft_simple.c",
        "if (mask && !mask[t]) continue;\n            const float",
        "const float",
        SCAN,
    ),
    Bug(
        "masked tokens get gradients over all keys",
        "aft_simple.c",
        MASKED + "\n            for (int c = 0; c < w; c++) pk[c] = pv[c] = 0.0f;",
        "if (0)\n            ;",
        SCAN,
    ),
    Bug(
        "masked tokens count in the replay",
        "aft_simple.c",
        MASKED + " {\n                for",
        "if (0) {\n                for",
        SCAN,
    ),
    Bug(
        "dq without the derivative of the gate",
        "aft_simple.c",
        "gg * yy * sg * (e1 * sg);",
        "gg * yy * sg;",
        SCAN,
        True,
    ),
    Bug(
        "dq over all keys without the derivative of the gate",
        "aft_simple.c",
        "gs * (1.0f - sg) * mean[c];",
        "gs * mean[c];",
        SCAN,
    ),
    Bug("dk and dv without the gate", "aft_simple.c", "            both *= q[c] >= 0 ? 1.0f : e1;\n", "", SCAN),
    Bug(
        "one chunk too many where 64 divides T",
        "aft_simple.c",
        "int64_t chunks = tm_ceil(a->T, SCAN_T);",
        "int64_t chunks = a->T / SCAN_T + 1;",
        "borders",
    ),
    Bug(
        "sums of the chunk after",
        "aft_simple.c",
        "((b * chunks + i) * 3) * a->D + c0;",
        "((b * chunks + (i + 1 < chunks ? i + 1 : i)) * 3) * a->D + c0;",
        SCAN,
        True,
    ),
    Bug(
        "sums of the first chunk",
        "aft_simple.c",
        "((b * chunks + i) * 3) * a->D + c0;",
        "((b * chunks) * 3) * a->D + c0;",
        SCAN,
    ),
    Bug("sums of another row", "aft_simple.c", "((b * chunks + i) * 3) * a->D + c0;", "(i * 3) * a->D + c0;", SCAN),
    Bug("the gradient of a later chunk is lost", "aft_simple.c", "r->tr[c] * r->f[c] + r->rc[c]", "r->rc[c]", SCAN),
    Bug(
        "a step back with the factor of the token itself",
        "aft_simple.c",
        "shrink = r->shrink[c], e",
        "shrink = signbit(e_[c]) ? fabsf(e_[c]) : 1.0f, e",
        SCAN,
    ),
    Bug(
        "a masked token cuts the way back",
        "aft_simple.c",
        "r->shrink[c] = 1.0f;\n            dv",
        "r->shrink[c] = 0.0f;\n            dv",
        SCAN,
    ),
    Bug(
        "the denominator is not rescaled",
        "aft_simple.c",
        "dc = s->dc[c] * old + new;",
        "dc = s->dc[c] + new;",
        "borders",
    ),
    Bug(
        "over all keys the old sums are not rescaled",
        "aft_simple.c",
        "double f = tm_exp_neg(s->m0[c] - s->m[c]);",
        "double f = 1.0;",
        SCAN,
    ),
    Bug(
        "the gate is that of the positive query", "aft_simple.c", "num *= q[c] >= 0 ? 1.0f : e1;", "num *= 1.0f;", SCAN
    ),
    Bug("a masked query has no gate", "aft_simple.c", "sg = gate ? tm_sigmoid(q[c]) : 1.0f;", "sg = 1.0f;", SCAN),
    Bug(
        "nothing to attend gives NaN",
        "aft_simple.c",
        "y[c] = den == 0 ? 0.0f : sg * num / den;",
        "y[c] = sg * num / den;",
        SCAN,
    ),
    Bug(
        "the last features of a row are left out",
        "aft_simple.c",
        "int n = (int)tm_min(w, D - c0);",
        "int n = (int)tm_min(w, D - c0) / 2 * 2;",
        SCAN,
        times=4,
    ),
    Bug(
        "queries read with the strides of keys",
        "aft_simple.c",
        "a->q, b * a->qb + t * a->qt + c0, qbuf",
        "a->q, b * a->kb + t * a->kt + c0, qbuf",
        SCAN,
        times=4,
    ),
    Bug(
        "values read with the strides of keys",
        "aft_simple.c",
        "a->v, b * a->vb + t * a->vt + c0, vbuf",
        "a->v, b * a->kb + t * a->kt + c0, vbuf",
        SCAN,
        times=5,
    ),
    Bug(
        "gradients read as if dense",
        "aft_simple.c",
        "a->g, b * a->gb + t * a->gt + c0",
        "a->g, (b * a->T + t) * a->D + c0",
        SCAN,
        times=3,
    ),
    Bug(
        "sums over all keys in one level",
        "aft_simple.c",
        "            }\n        }\n        scan_fold(s, w);\n",
        "            }\n        }\n        s->m[0] += 0;\n",
        SCAN,
    ),
    Bug(
        "gradients over all queries in one level",
        "aft_simple.c",
        "        memset(part, 0, sizeof part);\n",
        "        if (!t0) memset(part, 0, sizeof part);\n",
        SCAN,
    ),
    Bug("the rest of exp is dropped", "tm.h", "    r = n * 2.12194440e-4f + r;\n", "", SCAN, True),
    Bug(
        "bfloat16 is cut, not rounded",
        "tm.h",
        "uint32_t rounded = (i + 0x7fff + ((i >> 16) & 1)) >> 16;",
        "uint32_t rounded = i >> 16;",
        "halves",
    ),
    Bug(
        "float16 below its normal numbers is lost",
        "tm.h",
        "return rest < 0x0400 ? (sign ? -small : small) : f;",
        "return rest < 0x0400 ? 0.0f : f;",
        "halves",
    ),
    Bug("float16 loses its sign below its normal numbers", "tm.h", "(sign ? -small : small)", "small", "halves"),
    Bug(
        "float16 rounds down",
        "tm.h",
        "(rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13",
        "(rest - 0x38000000) >> 13",
        "halves",
    ),
    Bug("float16 overflows into NaN", "tm.h", "(rest > 0x7f800000 ? 0x7e00 : 0x7c00)", "0x7e00", "halves"),
    Bug(
        "a step does not rescale the denominator",
        "decode.c",
        "        den[c] = den[c] * old + new;\n",
        "        den[c] += new;\n",
        "decode aft_simple",
        True,
    ),
    Bug(
        "a step counts masked tokens",
        "decode.c",
        "if (!live || live[b * L + t]) step_join",
        "step_join",
        "decode aft_simple",
    ),
    Bug(
        "a key that leaves the window is lost",
        "decode.c",
        "        step_join(k, v, m, num, den, w);\n    }\n}",
        "    }\n}",
        "decode aft_local",
        True,
    ),
    Bug(
        "a convolution counts padding",
        "decode.c",
        "|| !(j < a->R ? a->lives[b * a->R + j] : a->live[b * a->L + j - a->R])) continue;",
        ") continue;",
        "convolution",
    ),
    Bug(
        "a convolution takes taps by index",
        "decode.c",
        "(uint64_t)a->at[b * a->L + t] - (uint64_t)step_place(a->places, a->at, b, j, a->R, a->L);\n        if (back",
        "(uint64_t)(a->R + t - j);\n        if (back",
        "convolution",
    ),
    Bug(
        "a convolution keeps the first tokens",
        "decode.c",
        "j = i % a->R + a->L; /* of",
        "j = i % a->R; /* of",
        "convolution",
    ),
    Bug("values of the ring are its keys", "decode.c", "values1 + to, v,", "values1 + to, k,", "decode aft_local"),
    Bug(
        "a window's sums keep an old maximum",
        "decode.c",
        "n[c] *= f, d[c] *= f;",
        "n[c] *= 1.0f;",
        "decode aft_local wide",
    ),
    Bug("the maximum of a head stands still", "decode.c", "*m = d > 0 ? k : *m;", "", "decode aft_conv"),
    Bug(
        "heads read the weights of the first", "decode.c", "b * a->wb + i * a->wh", "b * a->wb", "decode aft_conv", True
    ),
    Bug(
        "a bias of the last factors alone",
        "decode.c",
        "lanes[l] += (double)u[c + l] * (double)v[c + l];",
        "lanes[l] = u[c + l] * v[c + l];",
        "decode aft_local",
        True,
    ),
    Bug(
        "places of the first row",
        "decode.c",
        "step_place(a->places, a->at, b, j, a->R, a->L);\n            int near",
        "step_place(a->places - b * a->R, a->at, b, j, a->R, a->L);\n            int near",
        "decode aft_full",
    ),
    Bug(
        "a filter that starts at its other end",
        "decode.c",
        "h * a->taps + a->taps - 1 - (int64_t)back",
        "h * a->taps + (int64_t)back",
        "decode aft_conv",
    ),
    Bug(
        "a history shows the tokens after",
        "decode.c",
        "j0 + STEP_SEGMENT, a->R + t + 1);",
        "j0 + STEP_SEGMENT, a->R + a->L);",
        "decode aft_full",
        True,
    ),
    Bug(
        "segments in units of their own",
        "decode.c",
        "num[c] * old + new *(double)s[a->D + c]",
        "num[c] + (double)s[a->D + c]",
        "decode aft_full",
    ),
    Bug(
        "a query of any length",
        "decode.c",
        "qn = cosine ? step_norm(dtype, q, at, D, eps) : 1.0;",
        "qn = 1.0;",
        "decode hydra",
    ),
    Bug("masked tokens are counted", "decode.c", "*number += seen;", "*number += 1;", "decode hydra mean", True),
    Bug(
        "features past the last vector are not asked",
        "decode.c",
        "to[i] = x, lanes[0] += ask[i] * x;",
        "to[i] = x;",
        "decode linear",
    ),
    Bug(
        "matrices in units they no longer have",
        "decode.c",
        "m[i] = top, ask[i] += top;",
        "ask[i] += top;",
        "decode linear",
        True,
    ),
    Bug(
        "linear: a denominator without the sums before",
        "linear.c",
        "den[t] = near + linear_dot(w->q + t * a->E, w->z, a->E);",
        "den[t] = near;",
        LINEAR,
        True,
    ),
    Bug(
        "linear: masked keys count",
        "linear.c",
        "w->live[t] = t < n && (!a->mask || a->mask[b * a->S + t0 + t]);",
        "w->live[t] = t < n;",
        LINEAR,
    ),
    Bug(
        "linear: no derivative of elu",
        "linear.c",
        "d[i] = x[i] > 0 ? d[i] / (1.0f + x[i]) : d[i];",
        "d[i] += 0.0f;",
        LINEAR,
        True,
    ),
    Bug(
        "linear: the sums before keep the units of their state",
        "linear.c",
        "f[i] = exp(past[i] - m[i]);",
        "f[i] = 1.0;",
        "extended linear",
        True,
    ),
    Bug(
        "linear: the gradient of the denominator after the tokens has the other sign",
        "linear.c",
        "linear_take(a, a->g_end, j, NULL, -1.0, w);",
        "linear_take(a, a->g_end, j, NULL, 1.0, w);",
        "extended linear",
    ),
    Bug(
        "linear: the gradient of the sums before in the units of the first block",
        "linear.c",
        "scale[c] *= exp(-fabs((double)w->m[c] - m[c]));",
        "scale[c] *= 1.0;",
        "extended linear",
    ),
    Bug(
        "hydra: the gradient of the sum after the tokens is lost",
        "hydra.c",
        "double *sum = hydra_begin(a, b, g_end);",
        "double *sum = hydra_begin(a, b, NULL);",
        "extended hydra",
    ),
    Bug("hydra: eps is forgotten", "hydra.c", "1.0 / sqrt(square + eps))};", "1.0 / sqrt(square))};", "hydra"),
    Bug("hydra: a gradient along the token", "hydra.c", "(d[c] - x[c] * f.unit * r * along)", "(d[c])", "hydra", True),
    Bug(
        "hydra: the few tokens of a block's end are lost",
        "hydra.c",
        "    hydra_fold(run, a->D);\n}\n\n/* h_t",
        "}\n\n/* h_t",
        "hydra",
        True,
    ),
    Bug(
        "external: the largest weight of the first slots",
        "external.c",
        "for (; s < S; s++) top[0] = w[s] > top[0] ? w[s] : top[0];",
        "",
        "external",
    ),
    Bug(
        "external: a gradient with no sum over slots",
        "external.c",
        "w[s] * (g[s] - along);",
        "w[s] * g[s];",
        "external",
        True,
    ),
    Bug(
        "external: a gradient with no sum over tokens",
        "external.c",
        "d[c] -= tm_exp((row[c] - m[c]) - m[n + c]) * all[c];",
        "d[c] -= 0.0f;",
        "external",
        True,
    ),
    Bug(
        "RMS norm: the gradient along the token stays",
        "tokenwise.c",
        "(h[c] - u[c] * along) * scale;",
        "h[c] * scale;",
        "tokenwise",
        True,
    ),
    Bug(
        "RMS norm: the weight's gradient of the last block only",
        "tokenwise.c",
        "sum += parts[block * n + c];",
        "sum = parts[block * n + c];",
        "tokenwise",
    ),
    Bug(
        "rotary positions: every batch at the angles of the first",
        "tokenwise.c",
        "(shared ? r % T : r)",
        "(r % T)",
        "tokenwise",
        times=2,
    ),
    Bug(
        "rotary positions: features that are not turned get lost",
        "tokenwise.c",
        "if (e > 2 * m) memcpy",
        "if (e > 2 * m + 1) memcpy",
        "tokenwise",
    ),
    Bug(
        "SwiGLU: the slope of the sigmoid alone",
        "tokenwise.c",
        "(p + open * (1.0f - p));",
        "p;",
        "tokenwise",
        True,
    ),
]


def halves() -> None:
    """Check that every number of both half precisions passes through the library unchanged.

    What lies between two is rounded as torch rounds it.
    """
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        v = every.view(dtype)
        v = v[v.isfinite()].view(1, 1, -1)
        same = functional.aft_simple(v, torch.zeros_like(v), v, gate=None, backend="cpu")
        assert torch.equal(same, v), f"{dtype} does not pass"
        pair = torch.cat([v, v.roll(1, -1)], 1)
        want = (pair.double().sum(1, keepdim=True) / 2).to(torch.float32)
        got = functional.aft_simple(v, torch.zeros_like(pair), pair, gate=None, backend="cpu")
        fits = want.abs() < torch.finfo(torch.float32).max / 4  # the kernel's sum of two is float32
        wrong = (got != want.to(dtype)) & fits
        assert not bool(wrong.any()), (
            f"{dtype}: {int(wrong.sum())} means of two are rounded wrongly, "
            f"as {float(want[wrong][0])} to {float(got[wrong][0])}"
        )

    one = torch.ones(1, 1, 1, dtype=torch.float16).requires_grad_()
    y = functional.aft_simple(
        torch.zeros(1, 2, 1, dtype=torch.float16), torch.zeros_like(one), one, gate=None, backend="cpu"
    )
    assert float(torch.autograd.grad(y, one, torch.full_like(y, 6e4))[0]) == float("inf"), (
        "a sum too large for float16 is not infinite"
    )


CHECKS["halves"] = halves


def wide_grids() -> None:
    """Rows of several tiles, filters wider and narrower than the grid, with and without masks and prefixes."""
    draw = torch.Generator().manual_seed(0)
    for (H, W), s, prefix in (((3, 31), 5, 0), ((2, 17), 11, 2), ((6, 5), 15, 1), ((2, 130), 3, 0), ((33, 3), 33, 0)):
        T = prefix + H * W
        q, v = (torch.randn(2, T, 6, generator=draw) for _ in range(2))
        k, w, mask = (
            torch.randn(2, T, 2, generator=draw),
            torch.randn(2, s, s, generator=draw),
            torch.rand(2, T, generator=draw) < 0.8,
        )
        for options in ({}, {"key_mask": mask}):
            off = worst(both(functional.aft_conv, (q, k, v, w), {"grid": (H, W), "prefix": prefix, **options}))
            assert off < 1e-5, f"{H} x {W}, s={s}: off by {off:.1e}"


def drift_along_a_row() -> None:
    """Sums over a long row of a grid of equal terms stay what they are."""
    v = torch.full((1, 20_000, 1), 0.1)
    y = functional.aft_conv(
        v, torch.full_like(v, 0.1), v, torch.zeros(1, 1, 1), grid=(1, 20_000), gate=None, backend="cpu"
    )
    assert float((y - 0.1).abs().max()) < 1e-6, f"off by {float((y - 0.1).abs().max()):.1e}"


CHECKS |= {f.__name__: f for f in (wide_grids, drift_along_a_row)}

GRID, GRIDS = "aft_conv 2-D", "wide_grids"
BUGS += [
    Bug("no tap starts inside of a tile", "aft_conv2d.c", "switch (-c0 - d) {", "switch (0) {", GRID, True),
    Bug("no tap ends inside of a tile", "aft_conv2d.c", "switch (W - c0 - d) {", "switch (R) {", GRIDS),
    Bug(
        "a tile starts one tap late",
        "aft_conv2d.c",
        "d = -tm_min(a->half, c0 + R - 1);",
        "d = -tm_min(a->half, c0 + R - 2);",
        GRIDS,
    ),
    Bug("what lies beside the window is forgotten", "aft_conv2d.c", "W > half + 1 ? side : NULL", "NULL", GRIDS, True),
    Bug(
        "what lies beside the window begins inside of it",
        "aft_conv2d.c",
        "c > a->half ? line[c - a->half]",
        "c >= a->half ? line[c - a->half + 1]",
        GRID,
    ),
    Bug("rows below the window are forgotten", "aft_conv2d.c", "above[from] + below[H - to]", "above[from]", GRID),
    Bug("the second group of rows replaces the first", "aft_conv2d.c", "    if (!first) {", "    if (0) {", GRIDS),
    Bug("prefix tokens weigh nothing", "aft_conv2d.c", "tm_vf early = line[P];", "tm_vf early = line[0];", GRID),
    Bug("the filter is not turned around", "aft_conv2d.c", "a.transposed = 1;", "a.transposed = 0;", GRID, True),
    Bug(
        "the gradient of a tap stops short of the border",
        "aft_conv2d.c",
        "end = tm_min(W, W - d0);",
        "end = tm_min(W, W - d0 - R + 1);",
        GRID,
    ),
    Bug(
        "the gradient of a tap leaves out the first cells",
        "aft_conv2d.c",
        "tm_max(0, 1 - d0 - R)",
        "tm_max(0, -d0)",
        GRID,
    ),
    Bug(
        "wide filters get gradients in the middle only",
        "aft_conv2d.c",
        ", conv2d_tap_row(a, x, g, dy, 1, across + 1, total);",
        ";",
        GRIDS,
    ),
    Bug("a strip takes the key of its first head", "aft_conv2d.c", "/ per - s.first);", "/ per - s.first) * 0;", GRID),
    Bug(
        "masked values count on a grid",
        "aft_conv2d.c",
        "        if (conv2d_live(a, b, t))\n            x[t]",
        "        if (1)\n            x[t]",
        GRID,
    ),
    Bug("masked keys get gradients on a grid", "aft_conv2d.c", "        if (live) {", "        if (1) {", GRID),
    Bug(
        "denominators give nothing to keys",
        "aft_conv2d.c",
        "*(tm_vf *)sums += *(const tm_vfu *)(dkey",
        "(void)*(const tm_vfu *)(dkey",
        GRID,
    ),
    Bug(
        "denominators give nothing to weights",
        "aft_conv2d.c",
        "sum += taps[((p * all + a->strips",
        "sum += 0 * taps[((p * all + a->strips",
        GRID,
    ),
    Bug(
        "gradients of weights of one share only",
        "aft_conv2d.c",
        "for (int64_t p = 0; p < parts; p++)",
        "for (int64_t p = 0; p < 1; p++)",
        GRID,
    ),
    Bug(
        "sums along a row in one level",
        "aft_conv2d.c",
        "if (i % CONV_RUN == CONV_RUN - 1)",
        "if (0)",
        "drift_along_a_row",
    ),
]


def halves_are_nan() -> None:
    """NaN comes back as NaN from half precision, not as infinity."""
    for dtype in (torch.bfloat16, torch.float16):
        v = torch.full((1, 3, 40), float("nan"), dtype=dtype)
        assert functional.aft_simple(v, torch.zeros_like(v), v, backend="cpu").isnan().all(), f"{dtype} loses NaN"


CHECKS["halves are NaN"] = halves_are_nan
CHECKS |= {f"nonfinite {name}": functools.partial(check_all, name) for name in POISONED}
CHECKS |= {f"nonfinite decode {name}": functools.partial(check_stream, row) for name, row in STREAMS.items()}

BUGS += [
    Bug(
        "a denominator of NaN counts as none",
        "aft_simple.c",
        "y[c] = den == 0 ? 0.0f : num / den;",
        "y[c] = den > 0 ? num / den : 0.0f;",
        "nonfinite aft_simple",
        True,
    ),
    Bug("an infinite key is a large one", "aft_simple.c", "(kk)*0.0f + 1.0f", "1.0f", "nonfinite aft_simple"),
    Bug(
        "over all keys NaN counts as none",
        "aft_simple.c",
        "s.dn[c] == 0 ? 0.0f : s.no[c] / s.dn[c]",
        "s.dn[c] > 0 ? s.no[c] / s.dn[c] : 0.0f",
        "nonfinite aft_simple",
    ),
    Bug(
        "a row of NaN that nothing is asked of gives NaN",
        "aft_simple.c",
        "int none = gg == 0;",
        "int none = 0;",
        "nonfinite aft_simple",
    ),
    Bug(
        "nobody tells of NaN in AFT-full",
        "aft_full.c",
        "tm_tell(some, a->odd);",
        "(void)some;",
        "nonfinite aft_full",
        True,
    ),
    Bug(
        "a log-weight of NaN is the largest",
        "aft_full.c",
        "w[s] > FULL_CAP ? FULL_CAP : w[s];",
        "w[s] < FULL_CAP ? w[s] : FULL_CAP;",
        "nonfinite aft_full",
    ),
    Bug("nobody tells of NaN in a band", "aft_band.c", "    tm_tell(some, a->odd);\n", "", "nonfinite aft_local", True),
    Bug(
        "a tap of NaN is the largest",
        "aft_band.c",
        "x = x > BAND_CAP ? BAND_CAP : x;",
        "x = x < BAND_CAP ? x : BAND_CAP;",
        "nonfinite aft_conv",
    ),
    Bug(
        "nobody tells of NaN on a grid", "aft_conv2d.c", "        none += value * 0.0f;\n", "", "nonfinite aft_conv 2-D"
    ),
    Bug(
        "nobody tells of NaN values in linear attention",
        "linear.c",
        "some |= tm_odd(row[j]);",
        "some |= 0;",
        "nonfinite linear",
    ),
    Bug(
        "a query of NaN is e",
        "linear.c",
        "arg > 1.0f ? 1.0f : arg",
        "arg < 1.0f ? arg : 1.0f",
        "nonfinite linear",
        True,
        2,
    ),
    Bug(
        "queries of NaN give to keys though nothing is asked of them",
        "hydra.c",
        "h[c] == 0 ? 0.0f : x[c] * f.unit",
        "x[c] * f.unit",
        "nonfinite hydra",
    ),
    Bug(
        "a step takes NaN for no denominator",
        "decode.c",
        "d == 0 ? 0.0f : (float)num[c]",
        "!(d > 0) ? 0.0f : (float)num[c]",
        "nonfinite decode aft_simple",
        True,
    ),
    Bug(
        "a step takes an infinite key",
        "decode.c",
        "d * 0.0 + 1.0 : e; /*",
        "1.0 : e; /*",
        "nonfinite decode aft_simple",
    ),
    Bug(
        "a step takes NaN for no sum of a window",
        "decode.c",
        "all == 0 ? 0.0f : sum / all",
        "!(all > 0) ? 0.0f : sum / all",
        "nonfinite decode aft_local",
    ),
    Bug(
        "a step takes the logarithm of an infinite key",
        "decode.c",
        "log + d * 0.0 : d;",
        "log : d;",
        "nonfinite decode linear",
    ),
    Bug(
        "half precision takes NaN for infinity",
        "tm.h",
        "(i & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded",
        "(i & 0x7fffffff) > 0x7f800000 ? 0x7f80 : rounded",
        "halves are NaN",
    ),
]


def outcome(name: str) -> str:
    """ "kept", or what was noticed."""
    try:
        if name in CHECKS:
            CHECKS[name]()
        else:
            for seed in range(SEEDS):
                check(name, seed)
    except AssertionError as noticed:
        return str(noticed)
    return "kept"


def main() -> None:
    """``kernel_mutations.py CHECK...``: one JSON list."""
    torch.set_num_threads(1)
    assert cpu.available(), cpu.why_not()
    print(json.dumps({"library": os.environ["TOKENMIX_LIBRARY"], "results": [outcome(name) for name in sys.argv[1:]]}))


if __name__ == "__main__":
    main()
