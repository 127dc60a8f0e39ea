"""What a model adds to its embedding: positions by name and options."""

from __future__ import annotations

from torch import nn

from ..types import Options
from .checks import choose_class
from .digits import AbacusPositions, CoupledPositions
from .learned import LearnedPositions
from .sinusoidal import SinusoidalPositions
from .smooth import SmoothPositions

ADDED_POSITIONS: dict[str, type[nn.Module]] = {
    "learned": LearnedPositions,
    "sinusoidal": SinusoidalPositions,
    "abacus": AbacusPositions,
    "coupled": CoupledPositions,
    "smooth": SmoothPositions,
}


def build_added_positions(spec: object, dim: int, max_len: int, who: str) -> nn.Module | None:
    """Build the position encoding that is added to the embedding; None: no encoding.

    Args:
        spec: None, a name in ``ADDED_POSITIONS``, or an object of the name and options such as
            ``{"name": "abacus", "max_offset": 50}``. Options not given have their defaults; ``max_len`` of "learned" is
            that of the model.
        dim: features per token.
        max_len: longest sequence of the model.
        who: named in errors.

    Raises:
        MixerError: for an unknown name or option.
    """
    if spec is None:
        return None
    cls, options = _choice(spec, who)
    if cls is LearnedPositions:
        options.setdefault("max_len", max_len)
    return cls(dim, **options)


def check_added_positions(spec: object, who: str) -> None:
    """Raise an error, in the name of ``who``, for an unknown name or option of an added position encoding."""
    if spec is not None:
        _choice(spec, who)


def _choice(spec: object, who: str) -> tuple[type[nn.Module], Options]:
    """Return the class that a spec names and the options that it gives."""
    asked = {"name": spec} if isinstance(spec, str) and spec in ADDED_POSITIONS else spec
    return choose_class(asked, ADDED_POSITIONS, ("dim",), who=who, option="positions", others=", such a name or null")
