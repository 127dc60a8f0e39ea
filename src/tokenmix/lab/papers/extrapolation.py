"""Length extrapolation of Transformers: a survey of position encodings."""

from __future__ import annotations

from . import identities, places
from .claim import Claim, Number, Paper
from .rows import trained


def state() -> tuple[Claim, ...]:
    """Return the claims."""
    return (*absolute(), *relative(), *reading_queries(), *scaling(), *samplers(), *unbuilt())


def absolute() -> tuple[Claim, ...]:
    """Return the absolute encodings."""
    return (
        Claim(
            "Sinusoidal",
            "Sines and cosines of falling frequencies, added to the input.",
            (Number("our table against the equation", "equal", measure=identities.sinusoids),),
            "p[2i] = sin(pos / 10000^(2i / d)), p[2i + 1] = cos(pos / 10000^(2i / d))",
            "models.eamlp.sinusoids",
        ),
    )


def relative() -> tuple[Claim, ...]:
    """Return the relative encodings that the library has."""
    return (
        Claim(
            "RoPE",
            "Pairs of features are turned by the position, so that products of queries and keys depend on the distance "
            "alone.",
            (Number("the same distance 100 tokens later", "equal", measure=identities.rotary_is_relative),),
            "theta_m = 10000^(-2 (m - 1) / d)",
            "positions.rotary.RotaryPositions",
        ),
        Claim(
            "ALiBi",
            "The logit falls linearly with the distance, with a slope for each head and nothing to learn.",
            (Number("ours against the equation", "equal", measure=identities.pair_bias("alibi", identities.alibi)),),
            "m_h (j - i), m_h = 2^(-8 h / H)",
            "positions.pair.ALiBi",
        ),
        Claim(
            "T5 bias",
            "A learned bias per head and bucket of distances, near ones alone and far ones on a logarithmic scale.",
            (Number("distances 0 .. 128 in 32 buckets", "32", measure=identities.t5_bucket_count),),
            "beta[bucket(j - i)]",
            "positions.pair.T5Bias",
        ),
        Claim(
            "KERPLE",
            "A conditionally positive definite kernel of the distance, learned per head.",
            (Number("ours against the equation", "equal", measure=identities.pair_bias("kerple", identities.kerple)),),
            "-r1 log(1 + r2 |i - j|)",
            "positions.pair.Kerple",
        ),
        Claim(
            "Sandwich",
            "Products of sinusoidal positions as a bias, with nothing to learn.",
            (
                Number(
                    "ours against the equation, less its value at distance 0",
                    "equal",
                    measure=identities.pair_bias("sandwich", identities.sandwich),
                ),
            ),
            "p_i . p_j = sum_k cos((i - j) / 10000^(2 k / d))",
            "positions.pair.Sandwich",
        ),
        Claim(
            "FIRE",
            "A learned function of the distance, measured against the position of the query.",
            (Number("ours against the equation", "equal", measure=identities.pair_bias("fire", identities.fire)),),
            "f(psi(i - j) / psi(max(L, i))), psi(x) = log(c x + 1)",
            "positions.pair.Fire",
        ),
    )


def reading_queries() -> tuple[Claim, ...]:
    """Return the relative encodings that read more than the distance, or fade with it."""
    return (
        Claim(
            "Shaw",
            "A learned vector for each clipped distance, added to the key.",
            (Number("ours against the equation", "equal", measure=places.logit_bias("shaw", places.shaw)),),
            "q_i (k_j + p_r), r = clip(j - i)",
            "positions.content.ShawPositions",
        ),
        Claim(
            "xPOS",
            "RoPE whose products fade with the distance, the fast pairs first.",
            (Number("ours against the equation, 40 apart", "equal", measure=places.xpos),),
            "q zeta^i, k zeta^-j, zeta_m = (2 m / d + 0.4) / 1.4, positions / 512",
            "positions.xpos.XPositions",
        ),
        Claim(
            "CAPE (2024)",
            "An MLP of the logits and a bias by position of all heads, added to both.",
            (Number("ours against the equation", "equal", measure=places.logit_bias("cape", places.cape)),),
            "qk + b(i, j) + f(qk, b(i, j))",
            "positions.content.AdaptivePositions",
        ),
        Claim(
            "CoPE",
            "Positions that count the tokens which the query finds relevant.",
            (Number("ours against the equation", "equal", measure=places.logit_bias("cope", places.cope)),),
            "q_i e(p_ij), p_ij = sum_(k = j .. i) sigmoid(q_i k_k)",
            "positions.content.ContextualPositions",
        ),
    )


def scaling() -> tuple[Claim, ...]:
    """Return the rules for lengths beyond the trained one."""
    return (
        Claim(
            "Position interpolation",
            "All positions are divided by the factor of the new length.",
            (
                Number("factor 1 changes nothing", "equal", measure=identities.interpolation_by_one),
                Number("factor 4, a quarter of each frequency", "equal", measure=identities.interpolation),
            ),
            "n -> n / kappa",
            "positions.rotary.linear",
        ),
        Claim(
            "NTK-aware (Eq. 22)",
            "The base grows instead, so that fast pairs keep their frequency.",
            (Number("our frequencies against the equation", "equal", measure=identities.ntk_base),),
            "b -> b kappa^(d / (d - 2))",
            "positions.rotary.ntk",
        ),
        Claim(
            "NTK-by-parts and YaRN",
            "Fast pairs keep their frequency, slow ones are interpolated, those between are mixed; YaRN adds a "
            "temperature.",
            (Number("fastest and slowest pair, factor 4", "equal", measure=identities.yarn_ends),),
            "theta' = theta / kappa r + theta (1 - r)",
            "positions.rotary.yarn",
        ),
        Claim(
            "Dynamic NTK (Eq. 23)",
            "The factor follows the length read so far.",
            trained({"the rule": "an equation"}, built=False),
            "kappa = max(1, L_current / L)",
        ),
    )


def samplers() -> tuple[Claim, ...]:
    """Return the ways to let a model see longer positions in training, each measured on 4 tokens of 8 positions."""
    return (
        Claim(
            "SHAPE",
            "One random shift of all positions of a sequence in training.",
            (Number("rows of 4 that it can draw below 8", "5 rows", measure=places.sampled("offset"), derived=True),),
            "n -> n + k",
            "positions.samplers.offset",
        ),
        Claim(
            "Randomised positions",
            "A sorted subset of a longer range, drawn anew for each sequence in training.",
            (
                Number(
                    "rows of 4 that it can draw below 8", "70 rows", measure=places.sampled("randomised"), derived=True
                ),
            ),
            "n -> the n-th smallest of T of 0 .. M - 1",
            "positions.samplers.randomised",
        ),
        Claim(
            "PoSE",
            "Chunks keep their consecutive positions, with random skips between them.",
            (
                Number(
                    "rows of 4 that it can draw below 8, two chunks",
                    "13 rows",
                    measure=places.sampled("pose"),
                    derived=True,
                ),
            ),
            "n -> n + k beyond a random place",
            "positions.samplers.pose",
        ),
        Claim(
            "CAPE (2021)",
            "Sinusoids whose positions are shifted, jittered and scaled in training.",
            (
                Number(
                    "position 10, shift 4, jitter 0.5, scale 2", "2.75 to 29", measure=places.cape_range, derived=True
                ),
            ),
            "n -> c (n + a + e_n)",
            "positions.samplers.jittered",
        ),
    )


def unbuilt() -> tuple[Claim, ...]:
    """Return the entries of Table 1 and of Section 4 that the library does not have."""
    table = {
        "Complex": "each word a trainable rotation",
        "FLOATER": "positions from a neural differential equation",
        "TISE, bilevel": "discussed beside the table",
    }
    truncated = {"truncated basis": "theta >= b kept, a constant between, 0 below a"}
    return (
        Claim("Table 1, other rows", "Encodings without a module here.", trained(table, built=False)),
        Claim("Truncated basis", "Slow pairs are set to a constant or to 0.", trained(truncated, built=False)),
    )


PAPER = Paper(
    "extrapolation",
    "Length Extrapolation of Transformers: A Survey from the Perspective of Positional Encoding",
    "Zhao et al. 2024",
    "2312.17044",
    state,
)
