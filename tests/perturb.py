"""Give mixers parameters that matter: those that start tiny, as position biases do, then show in the outputs."""

from __future__ import annotations

from typing import Any


def perturb_mixers(model: Any) -> Any:
    """Add noise to every parameter of every mixer of a model, in place, and put the model in eval mode.

    A query at a wrong position, for example, then gives other logits.
    """
    from tokenmix import Mixer  # here: some callers choose a library first
    from tokenmix.testing import perturb as add_noise

    for i, mixer in enumerate(m for m in model.modules() if isinstance(m, Mixer)):
        add_noise(mixer, seed=i)
    return model.eval()
