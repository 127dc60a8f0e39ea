"""One sequence over many ranks."""

from .sim import SimWorld, Traffic

__all__ = ["SimWorld", "Traffic"]
