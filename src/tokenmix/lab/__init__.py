"""The laboratory: data, training, sweeps, reports and the papers' experiments, around the mixers of the library.

``lab.train(config, out, ...)`` trains, ``lab.Run(out)`` records a loop of your own; both are imported when asked for.
"""

from typing import Any

__all__ = ["Run", "train"]  # noqa: F822  (by __getattr__)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "Run":
        return import_module(".train", __name__).Run
    if name == "train":  # the folder, which can be called as its function
        return import_module(".train", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
