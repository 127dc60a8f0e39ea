"""Read rotary positions from Hugging Face configs."""

from __future__ import annotations

from ..errors import MixerError
from ..types import Options, Record

NAMES = {"original_max_position_embeddings": "original_max_len"}
ROPE_SCALING = {
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}
"""rope_type -> the fields that our scaling of the same name reads."""
FIXED = "for one length L fix them, positions={'name': 'rotary', 'base': rope_theta, 'scaling': "
BY_HAND = {
    "dynamic": FIXED + "{'name': 'ntk', 'factor': factor * L / max_position_embeddings - factor + 1}}",
    "longrope": FIXED + "{'name': 'factors', 'factors': short_factor or long_factor, 'attention_factor': ...}}",
}
"""rope_type whose angles depend on the length of the text -> how to fix them for one length."""


def rotary_spec(rope_parameters: Record, *, head_dim: int, max_len: int | None = None, layout: str = "half") -> Options:
    """Return the ``positions`` of ``attention`` that equal a Hugging Face ``config.rope_parameters``.

    Args:
        rope_parameters: {"rope_type": .., "rope_theta": .., "factor": .., ..}, as transformers >= 5 writes it.
        head_dim: of that model; ``partial_rotary_factor`` is a share of it.
        max_len: the config's ``max_position_embeddings``, from which YaRN computes a missing factor.
        layout: "half" for the Llama and GPT-NeoX families, "interleaved" for GPT-J's.

    Raises:
        MixerError: for a rope_type without a counterpart here, by name.
    """
    given = {name: value for name, value in rope_parameters.items() if value is not None}
    rule = given.get("rope_type", "default")
    if rule != "default" and rule not in ROPE_SCALING:
        why = "its angles change as a sequence grows, so those of stored keys would be wrong"
        how = f"default, {', '.join(ROPE_SCALING)} have one" if rule not in BY_HAND else BY_HAND[rule]
        why = why if rule in BY_HAND else "it is unknown here"
        raise MixerError(f"rotary_spec: rope_type={rule!r} has no counterpart: {why}; {how}.")
    spec: Options = {"name": "rotary", "base": float(given.get("rope_theta", 10000.0)), "layout": layout}
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        spec["rotary_dim"] = int(head_dim * given["partial_rotary_factor"])
    if rule == "default":
        return spec
    scaling = {"name": rule, **{NAMES.get(name, name): given[name] for name in ROPE_SCALING[rule] if name in given}}
    if rule == "yarn":
        scaling |= _yarn(given, max_len)
    return {**spec, "scaling": scaling}


def _yarn(given: Record, max_len: int | None) -> Options:
    """Return YaRN's factor, from two lengths if it is not given, and its two scales, which work together."""
    factor = given.get("factor")
    if factor is None:
        if max_len is None or "original_max_position_embeddings" not in given:
            needs = "needs original_max_position_embeddings and max_len, the extended length"
            raise MixerError(f"rotary_spec: yarn without a factor {needs}.")
        factor = max_len / given["original_max_position_embeddings"]
    scales = {name: given.get(name) for name in ("mscale", "mscale_all_dim")}
    return {"factor": factor, **(scales if all(scales.values()) else {})}
