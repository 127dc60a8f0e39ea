"""Check the tensors of a kernel against each other before their addresses go to C or Triton."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import MixerError
from ..types import Options
from .cpu import DTYPES

KINDS = {"bool": torch.bool, "uint8": torch.uint8, "int64": torch.int64, "float32": torch.float32, "float": None}
_PATTERN = re.compile(r"(\w+)([?!]*)\(([^)]*)\)(?::(\w+))?")


class Declared(NamedTuple):
    """One tensor of a kernel.

    Args:
        dims: its sizes by name; sizes of one name are equal in all tensors.
        may_be_1: for each size, whether it may be 1 instead.
        leads: whether any number of further sizes come before these, the same in all tensors that say so.
        same: whether it has the dtype of the kernel's main tensor.
        dtype: the dtype it has otherwise; None: any floating point one.
    """

    name: str
    optional: bool
    differentiable: bool
    dims: tuple[str, ...]
    may_be_1: tuple[bool, ...]
    leads: bool
    same: bool
    dtype: torch.dtype | None

    def takes(self, dtype: torch.dtype, main: torch.dtype) -> bool:
        """Return whether it may have this dtype, beside a main tensor of another."""
        return dtype is (main if self.same else self.dtype) or (
            not self.same and self.dtype is None and dtype.is_floating_point
        )


def parse_declaration(inputs: str) -> list[Declared]:
    """Read a declaration such as "q?(B,T,D) k(B,S,D) w(B|1,T,S):float key_mask?!(B,S):bool".

    "?" may be None, "!" has no gradient, "B|1" is B or 1, "*" stands for leading sizes. The dtype is that of the main
    tensor, the first without "?", unless one of ``KINDS`` follows.
    """
    found = []
    for name, marks, sizes, kind in _PATTERN.findall(inputs):
        dims = [each for each in sizes.split(",") if each not in ("*", "")]
        ones = tuple(each.endswith("|1") for each in dims)
        names = tuple(each.removesuffix("|1") for each in dims)
        found.append(
            Declared(name, "?" in marks, "!" not in marks, names, ones, "*" in sizes, not kind, KINDS.get(kind))
        )
    return found


def check_shapes(
    who: str,
    inputs: str,
    each: Sequence[Declared],
    tensors: Sequence[Tensor | None],
    options: Options,
    main: Tensor | None,
    fits: Callable[[dict[str, Any], Options], bool] | None,
) -> None:
    """Raise MixerError unless the tensors have the declared dtypes and sizes and one device, and ``fits`` accepts them.

    Args:
        options: the kernel's other arguments; one that has the name of a size is that size.
        fits: a further condition on the sizes by name and the options. Among the sizes stand the tensors that are None,
            and whether the tensors are on a GPU, as "cuda".
    """
    if main is None or any(a is None and not one.optional for one, a in zip(each, tensors, strict=True)):
        refuse_shapes(who, inputs, tensors, options)
    sizes: dict[str, Any] = {"T": options["T"]} if "T" in options else {}
    sizes["cuda"] = main.is_cuda
    device, dtype = main.device, main.dtype
    right = dtype in DTYPES
    for one, a in zip(each, tensors, strict=True):
        if a is None:
            sizes[one.name] = None
            continue
        shape, count = a.shape, len(one.dims)
        if one.leads:
            lead = shape[: len(shape) - count]
            shape = shape[len(shape) - count :]
            right = right and sizes.setdefault("*", lead) == lead
        right = right and len(shape) == count and a.device == device and one.takes(a.dtype, dtype)
        if not right:
            break
        for name, may_be_1, n in zip(one.dims, one.may_be_1, shape, strict=True):
            if not (may_be_1 and n == 1) and sizes.setdefault(name, n) != n:
                right = False
    if not right or fits is not None and not fits(sizes, options):
        refuse_shapes(who, inputs, tensors, options)


def refuse_shapes(who: str, inputs: str, tensors: Sequence[Tensor | None], options: Options) -> NoReturn:
    """Raise MixerError: the tensors do not fit each other."""
    kinds = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    got = ", ".join(
        "None" if a is None else f"{kinds.get(a.dtype, a.dtype)} {tuple(a.shape)} on {a.device}" for a in tensors
    )
    more = "".join(f", {name}={value!r}" for name, value in options.items())
    raise MixerError(
        f"{who}: its kernel takes {inputs} in float32, bfloat16 or float16 on one device, got {got}{more}."
    )
