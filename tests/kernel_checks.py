"""Share what the tests of the kernels have in common.

That is the contract's adversarial measure at other sizes, and a backend against the eager form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tokenmix import use_backend
from tokenmix.kernels.cpu import build
from tokenmix.testing import PROMISES, equality, run_promise, subject


def adversarial(
    name: str,
    options: dict[str, Any],
    *,
    dim: int,
    length: int,
    backend: str = "cpu",
    grid: tuple[int, ...] | None = None,
) -> None:
    """Check a mixer's promise ``accurate_on_adversarial_keys`` on its functional form and one backend.

    1e-5 against the float64 reference, gradients too.
    """
    with use_backend(backend), mock.patch.multiple(equality, LONG=length, LONG_GRID=length):
        result = run_promise(
            subject(name, options, dim=dim, grid=grid),
            "accurate_on_adversarial_keys",
            PROMISES["accurate_on_adversarial_keys"],
        )
    assert result.status == "kept", str(result)


def both(
    form: Callable[..., Tensor], args: tuple[Tensor, ...], options: dict[str, Any], *, backend: str = "cpu"
) -> list[tuple[Tensor, Tensor]]:
    """Compute (kernel, float64 eager) of the output and of every floating point argument's gradient.

    Both start from the same numbers.
    """
    found = []
    for name, dtype in ((backend, None), ("eager", torch.float64)):
        leaves = [a.detach().to(dtype or a.dtype).requires_grad_() for a in args]
        y = form(*leaves, **options, backend=name)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(args[0].dtype)
        grads = torch.autograd.grad((y * weight.to(y.dtype)).sum(), leaves, allow_unused=True)
        found.append([y, *(torch.zeros_like(a) if g is None else g for a, g in zip(leaves, grads, strict=True))])
    return list(zip(*found, strict=True))


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """Return the largest relative error of ``both``, gradients relative to the largest of them.

    It is infinite where a kernel's number is not finite.
    """
    sizes = [float(b.detach().abs().max()) if b.numel() else 0.0 for _, b in pairs]
    scales = [sizes[0], *[max(sizes[1:], default=0.0)] * (len(pairs) - 1)]
    errors = [
        float((a.detach().double() - b.detach()).abs().max()) / max(scale, 1e-30)
        for (a, b), scale in zip(pairs, scales, strict=True)
        if a.numel()
    ]
    return max((e if e == e else float("inf") for e in errors), default=0.0)


def _size(text: str, name: str) -> int:
    """Return the length of an array in C, a number or a constant of an enum."""
    return int(name) if name.isdigit() else int(re.search(rf"\b{name} = (\d+)", text)[1])


def structs(sources: Path = build.SOURCES) -> dict[str, str]:
    """List every exported function that takes one struct, by name: p, l or d for each of the struct's fields.

    A field has 8 bytes and is a pointer, an integer or a float64.
    """
    found = {}
    for path in sources.glob("*.c"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.S)
        layouts = {name: inside for inside, name in re.findall(r"typedef struct \{([^}]*)\} (\w+);", text)}
        for name, kind in re.findall(r"^TM_EXPORT\((\w+)\)\(const (\w+_in) \*a\) \{", text, flags=re.M):
            fields = []
            for line in filter(None, map(str.strip, layouts[kind].split(";"))):
                base = "d" if line.replace("const ", "").startswith("double") else "l"
                for part in line.split(","):
                    count = re.search(r"\[(\w+)\]", part)
                    fields += ["p" if "*" in part else base] * (_size(text, count[1]) if count else 1)
            found[name] = "".join(fields)
    return found
