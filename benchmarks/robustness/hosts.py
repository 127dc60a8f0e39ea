"""What users of torch.nn, timm and transformers do with the models they know, done with ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from . import attempt


def _tried(what: Callable[[], Any]) -> str:
    """What it returns, or the first line of what it raises."""
    warnings.simplefilter("ignore")
    try:
        return str(what())
    except Exception as why:  # a user sees this line
        said = (str(why).strip() or "nothing").splitlines()[0]
        return f"{type(why).__name__}: {said}"


@attempt("h2", "A frozen DeiT with AFT-full at another image size")
def frozen_resize() -> str:
    """Its pair biases became trainable."""
    import tokenmix.hosts.timm  # noqa: F401, I001  # registers its models, and sees to a torchvision that fits
    import timm

    model = timm.create_model("deit_tiny_aft_full_patch16_224", depth=2).requires_grad_(False)
    model.set_input_size(256)
    return f"{sum(p.requires_grad for p in model.parameters())} parameters to train"
