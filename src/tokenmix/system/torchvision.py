"""Import torchvision beside a torch it was not built for.

A CUDA wheel beside a CPU torch fails to import because two operators are missing that nothing here calls.
"""

from __future__ import annotations

import importlib.util
import sys

import torch

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
REPAIR = "import tokenmix.hosts.torchvision"
"""The line that a script needs before it imports timm or transformers itself."""
_kept: list[torch.library.Library] = []  # a torch.library.Library removes its operators when it is collected


def torchvision_hint(error: BaseException) -> str:
    """Return advice on an exception that such a torchvision caused; "" for any other exception."""
    seen: BaseException | None = error
    while seen is not None:
        if "torchvision::" in str(seen):
            pair = "torchvision was built for another torch"
            return f"; {pair}: write `{REPAIR}` before timm, transformers or torchvision are imported"
        seen = seen.__cause__ or seen.__context__
    return ""


def ensure_torchvision() -> bool:
    """Make ``import torchvision`` work where only those operators are missing; timm and transformers import it.

    Returns:
        False where torchvision is not installed.
    """
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        import torchvision  # noqa: F401  (the question is whether it imports)
    except RuntimeError as why:
        if "torchvision::" not in str(why):
            raise
    else:
        return True
    for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS:
        library.define(schema)
    _kept.append(library)
    try:
        import torchvision  # noqa: F401  (for whoever imports it next)
    except Exception as why:  # what a half-built package raises is its own
        said = " ".join(str(why).split())[:160].rstrip(".")
        from ..errors import MixerError  # here, as this file also runs by itself, outside of the package

        raise MixerError(f"torchvision cannot be imported ({said}): {reinstall_torchvision()}.") from None
    return True


def reinstall_torchvision() -> str:
    """Return the command that installs the torchvision that fits this torch."""
    build = torch.__version__.partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return f"pip install --force-reinstall --no-deps torchvision{index}"
