"""Models whose mixers are heard: what starts tiny, as position biases do, is given a size that shows in the outputs."""

from __future__ import annotations

from typing import Any


def perturb_mixers(model: Any) -> Any:
    """Noise on every parameter of every mixer of a model, in place; a query at a wrong position, say, then gives other logits. In eval mode."""
    from tokenmix import Mixer  # here: some callers choose a library first
    from tokenmix.testing import perturb as add_noise

    for i, mixer in enumerate(m for m in model.modules() if isinstance(m, Mixer)):
        add_noise(mixer, seed=i)
    return model.eval()
