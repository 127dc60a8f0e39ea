"""Rotary positions: feature pairs rotated by angles that grow with the position, and scaling rules."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..kernels.tokenwise import rotate
from ..types import Options
from .checks import check_exact, is_whole, number

LAYOUTS = ("half", "interleaved")


class RotaryPositions(nn.Module):
    """Rotary positions R_t x (Su et al. 2021, arXiv 2104.09864, Eq. 15 and 16).

    Pair m of each head's first ``rotary_dim`` = d features is rotated by the angle t theta_m, theta_m = base^(-2 m /
    d), m = 0 .. d / 2 - 1, so (R_t q) . (R_s k) depends on t - s alone. There are no parameters or buffers: angles are
    computed from the positions in float64 (float32 on devices without it), taken modulo a full turn, and applied in
    float32 or better.

    Args:
        head_dim: features of a head.
        base: the base of the geometric sequence of frequencies; Llama 3 uses 500000.
        rotary_dim: how many features of each head are rotated, counted from the first; even. Default: all.
        layout: which features form a pair. "half": i and i + d / 2, as in Llama and GPT-NeoX; "interleaved": 2 i and
            2 i + 1, as in the paper and GPT-J.
        scaling: None, or the rule for contexts longer than those trained on, {"name": one of ``SCALING_RULES``,
            "factor": new length / old length, ...}.

    Raises:
        MixerError: for invalid options or an invalid rule.
    """

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        rotary_dim: int | None = None,
        layout: str = "half",
        scaling: Options | None = None,
    ):
        super().__init__()
        self.head_dim, self.base, self.rotary_dim = head_dim, base, head_dim if rotary_dim is None else rotary_dim
        self.layout = layout
        if not is_whole(self.rotary_dim, 2) or self.rotary_dim % 2 or self.rotary_dim > head_dim:
            _refuse(f"rotary_dim must be even and in 2..head_dim={head_dim}, got {self.rotary_dim!r}")
        if not number(base) or base <= 1:
            _refuse(f"base must be a number above 1, got {base!r}")
        if layout not in LAYOUTS:
            _refuse(f"layout={layout!r} is unknown; choose 'half' or 'interleaved'")
        self.scale(scaling)

    def scale(self, scaling: Options | None) -> None:
        """Take another scaling rule; keys that a stream has stored keep the angles of the old one."""
        frequencies, self.gain = scaled_frequencies(self.rotary_dim, self.base, scaling)
        self.rates = tuple(theta / (2 * math.pi) for theta in frequencies)  # turns per position
        self.scaling = scaling

    def reset_parameters(self) -> None:
        """Do nothing: there are no parameters."""

    def forward(self, positions: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Rotate each of ``tensors`` by the angles of integer ``positions`` (B, T).

        The tensors are (B, T, heads * head_dim), with any number of heads.
        """
        if positions.stride(0) == 0:  # the same in all rows
            positions = positions[:1]
        check_exact(type(self).__name__, positions)
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        turns = positions[:, :, None].to(exact) * torch.tensor(self.rates, dtype=exact, device=positions.device)
        turns = turns - turns.floor()
        wide = [torch.promote_types(x.dtype, torch.float32) for x in tensors]
        waves = {dtype: self._waves(turns.to(dtype)) for dtype in set(wide)}
        return tuple(self._rotate_heads(x, *waves[dtype]) for x, dtype in zip(tensors, wide, strict=True))

    def _waves(self, turns: Tensor) -> tuple[Tensor, Tensor]:
        angles = 2 * math.pi * turns
        return self.gain * angles.cos(), self.gain * angles.sin()

    def _rotate_heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.head_dim))
        return rotate(heads, cos, sin, interleaved=self.layout == "interleaved").flatten(2)

    def extra_repr(self) -> str:
        """Return the options, for print."""
        width = f"head_dim={self.head_dim}, base={self.base:g}, rotary_dim={self.rotary_dim}"
        return f"{width}, layout={self.layout!r}, scaling={self.scaling}"


@contextmanager
def rescaled(model: nn.Module, scaling: str | Options, *, old: int, new: int) -> Iterator[Options]:
    """Give all rotary positions of ``model`` another scaling rule within a ``with`` block.

    Args:
        scaling: the rule, as in ``RotaryPositions``, or its name, which stands for the rule from ``old`` to ``new``
            tokens: ``factor`` new / old, and ``original_max_len`` old where the rule has it.

    Yields:
        The rule.

    Raises:
        MixerError: if the model has no rotary positions, ``new`` is not above ``old`` where a name is given, or the
            rule is invalid.
    """
    found = [m for m in model.modules() if isinstance(m, RotaryPositions)]
    if not found:
        raise MixerError(f"{type(model).__name__} has no rotary positions to scale.")
    rule = _rule(scaling, old, new) if isinstance(scaling, str) else scaling
    before = [m.scaling for m in found]
    try:
        for module in found:
            module.scale(rule)
        yield rule
    finally:
        for module, then in zip(found, before, strict=True):
            module.scale(then)


def _rule(name: str, old: int, new: int) -> Options:
    """Return the rule of this name from ``old`` to ``new`` tokens."""
    if name not in SCALING_RULES:
        _refuse(f"scaling must be one of {', '.join(SCALING_RULES)}, or the rule as a dict, got {name!r}")
    if new <= old:
        _refuse(f"scaling {name!r} is for more tokens than the {old} of training, got {new}")
    takes = inspect.signature(SCALING_RULES[name]).parameters
    return {"name": name, "factor": new / old} | ({"original_max_len": old} if "original_max_len" in takes else {})


def scaled_frequencies(rotary_dim: int, base: float, scaling: Options | None = None) -> tuple[list[float], float]:
    """Return the frequencies after the scaling rule, and the factor on rotated queries and keys.

    theta_m is in radians per position, m = 0 .. rotary_dim / 2 - 1. The factor is 1 except for YaRN.
    """
    if scaling is None:
        return _frequencies(rotary_dim, base), 1.0
    if not isinstance(scaling, dict) or scaling.get("name") not in tuple(SCALING_RULES):
        dynamic = isinstance(scaling, dict) and scaling.get("name") == "dynamic"
        hint = "; dynamic NTK changes the angles of keys already stored" if dynamic else ""
        _refuse(f'scaling must be None or {{"name": one of {", ".join(SCALING_RULES)}, ...}}, got {scaling!r}{hint}')
    rule, options = SCALING_RULES[scaling["name"]], {name: value for name, value in scaling.items() if name != "name"}
    known = {p.name: p.default for p in inspect.signature(rule).parameters.values() if p.kind is p.KEYWORD_ONLY}
    if not set(options) <= set(known) or any(
        default is inspect.Parameter.empty and name not in options for name, default in known.items()
    ):
        needs = ", ".join(
            name if default is inspect.Parameter.empty else f"{name} (optional)" for name, default in known.items()
        )
        _refuse(f"scaling {scaling['name']!r} takes {needs}; got {', '.join(options) or 'no options'}")
    for name, value in options.items():
        _check_option(name, value)
    return rule(rotary_dim, float(base), **options)


def linear(d: int, base: float, *, factor: float) -> tuple[list[float], float]:
    """Scale to theta / factor: position n is treated as n / factor. Chen et al. 2023, arXiv 2306.15595, Eq. 4."""
    return [theta / factor for theta in _frequencies(d, base)], 1.0


def ntk(d: int, base: float, *, factor: float) -> tuple[list[float], float]:
    """Scale the base: base' = base factor^(d / (d - 2)). Peng et al. 2023, arXiv 2309.00071.

    The fastest pair keeps its frequency; the slowest rotates ``factor`` times as slowly.
    """
    if d < 4:
        _refuse(f"scaling 'ntk' needs rotary_dim >= 4, got {d}")
    return _frequencies(d, base * factor ** (d / (d - 2))), 1.0


def yarn(
    d: int,
    base: float,
    *,
    factor: float,
    original_max_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float | None = None,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    truncate: bool = True,
) -> tuple[list[float], float]:
    """Scale to theta_m (1 - r_m) + theta_m r_m / factor. Peng et al. 2023, arXiv 2309.00071.

    Queries and keys are multiplied by ``attention_factor``, by default 0.1 ln(factor) + 1, or as in DeepSeek's models
    (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), if both are given. r_m rises linearly from 0 at
    the pair that turns ``beta_fast`` times within ``original_max_len`` to 1 at the pair that turns ``beta_slow`` times.
    It is linear in m, between whole numbers of pairs unless ``truncate`` is False, as in the authors' code, with which
    models were trained; in the paper it is linear in the turns.
    """
    if beta_fast <= beta_slow:
        _refuse(f"scaling 'yarn' needs beta_fast > beta_slow, got {beta_fast} and {beta_slow}")
    low, high = (
        d * math.log(original_max_len / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (beta_fast, beta_slow)
    )
    if (mscale is None) != (mscale_all_dim is None):
        _refuse("scaling 'yarn' takes mscale and mscale_all_dim together or neither")
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low or 0.001
    ramp = [min(max((m - low) / width, 0.0), 1.0) for m in range(d // 2)]
    thetas = [theta * (1 - r) + theta * r / factor for theta, r in zip(_frequencies(d, base), ramp, strict=True)]
    if attention_factor is None:
        above, below = (0.1 * m * math.log(factor) + 1 for m in (mscale or 1.0, mscale_all_dim or 0.0))
        attention_factor = above / below
    return thetas, attention_factor


def llama3(
    d: int,
    base: float,
    *,
    factor: float,
    original_max_len: int,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
) -> tuple[list[float], float]:
    """Scale the slow pairs, as in the code released with Llama 3.1 (Dubey et al. 2024, arXiv 2407.21783).

    theta for pairs that turn ``high_freq_factor`` times or more within ``original_max_len``, theta / factor for those
    that turn at most ``low_freq_factor`` times, linear in the turns between them.
    """
    if low_freq_factor >= high_freq_factor:
        _refuse(
            f"scaling 'llama3' needs high_freq_factor > low_freq_factor, got {high_freq_factor} and {low_freq_factor}"
        )
    thetas = []
    for theta in _frequencies(d, base):
        kept = (original_max_len * theta / (2 * math.pi) - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        thetas.append(theta * kept + theta / factor * (1 - kept))
    return thetas, 1.0


def factors(
    d: int, base: float, *, factors: list[float], attention_factor: float | None = None
) -> tuple[list[float], float]:
    """Scale each pair by its own factor: theta_m / factors[m], as found by LongRoPE's search.

    Ding et al. 2024, arXiv 2402.13753. Queries and keys are multiplied by ``attention_factor``, by default 1.
    """
    if len(factors) != d // 2:
        _refuse(f"scaling 'factors' needs rotary_dim / 2 = {d // 2} factors, got {len(factors)}")
    thetas = [theta / factor for theta, factor in zip(_frequencies(d, base), factors, strict=True)]
    return thetas, attention_factor or 1.0


SCALING_RULES: dict[str, Callable[..., tuple[list[float], float]]] = {
    "linear": linear,
    "ntk": ntk,
    "yarn": yarn,
    "llama3": llama3,
    "factors": factors,
}
"""Scaling rules for longer contexts, by name.

Dynamic NTK, whose base grows with the sequence, is not supported: keys in a stream's state would need new angles.
"""


def _frequencies(d: int, base: float) -> list[float]:
    return [base ** (-2 * m / d) for m in range(d // 2)]


def _check_option(name: str, value: object) -> None:
    if name == "factors":
        if not isinstance(value, (list, tuple)) or not all(number(each) and each > 0 for each in value):
            _refuse(f"factors must be a list of positive numbers, got {value!r}")
    elif name == "truncate":
        if not isinstance(value, bool):
            _refuse(f"truncate must be True or False, got {value!r}")
    elif name == "original_max_len":
        if not is_whole(value, 1):
            _refuse(f"original_max_len must be an integer >= 1, got {value!r}")
    elif name == "factor":
        if not number(value) or value < 1:
            _refuse(f"factor must be a number >= 1, the new length over the old, got {value!r}")
    elif not (name in ("attention_factor", "mscale", "mscale_all_dim") and value is None) and (
        not number(value) or value <= 0
    ):
        _refuse(f"{name} must be a positive number, got {value!r}")


def _refuse(why: str) -> NoReturn:
    raise MixerError(f"RotaryPositions: {why}.")
