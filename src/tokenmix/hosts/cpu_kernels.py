"""Let the recurrent layers of an unchanged model of transformers run on the C kernels."""

from __future__ import annotations

import inspect
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from types import CellType, FunctionType, MethodType, TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from ..errors import MixerError
from ..kernels import cpu
from .cache_names import CACHE_NAMES
from .recurrent_functions import ARGUMENTS, FUNCTIONS, find_starts, replace_function, run_gate

FAMILIES = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "olmo_hybrid",
    "kimi_linear",
    "mamba2",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "zamba2",
    "lfm2",
    "lfm2_moe",
)
"""Models of transformers whose layers are replaced."""
KNOWN = ", ".join(FAMILIES)
GATE = "KimiLinearForgetGate"
"""The class whose ``forward`` is replaced as a whole."""
MAMBA_1 = ("mamba_selective_scan", "mamba_inner_fn")
KEEPS_KWARGS = "Mamba2ForCausalLM"
"""The class that passes no keyword of documents on to its layers."""
ENDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")
DOCUMENTS = ("position_ids", "seq_idx", *ENDS)
MARK = "_tokenmix_kernels"
_handed: ContextVar[dict[str, Any] | None] = ContextVar("documents of the model around", default=None)


@dataclass(eq=False)
class CpuKernels:
    """Report what ``cpu_kernels`` replaced, and undo it, at the end of a ``with`` block too.

    Args:
        model: the model, or a part of it.
        replaced: name of a layer -> the functions of transformers that it no longer calls.
        kept: name of a layer that runs as before -> why.
    """

    model: nn.Module = field(repr=False)
    replaced: dict[str, tuple[str, ...]]
    kept: dict[str, str]
    _methods: list[tuple[nn.Module, MethodType]] = field(repr=False)
    _hooks: list[Any] = field(repr=False)

    def undo(self) -> None:
        """Give the model its own functions back; a second call does nothing.

        Raises:
            MixerError: something else has replaced ``forward`` of a layer since.
        """
        for module, method in self._methods:
            if module.__dict__.get("forward") is not method:
                _refuse(f"the forward of a {type(module).__name__} was replaced since; undo that first")
        for module, _ in self._methods:
            del module.__dict__["forward"]
        for hook in self._hooks:
            hook.remove()
        self._methods.clear()
        self._hooks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "" if self._methods else ", undone"
        kinds = Counter((type(self.model.get_submodule(name)).__name__, of) for name, of in self.replaced.items())
        lines = [f"cpu_kernels of a {type(self.model).__name__}{state}:"]
        lines += [f"  {count} {kind}: {', '.join(of)}" for (kind, of), count in kinds.items()]
        lines += [f"  {name} runs as before: {why}" for name, why in self.kept.items()]
        return "\n".join(lines)


def cpu_kernels(model: nn.Module) -> CpuKernels:
    """Let the recurrent layers of a model of transformers run on the C kernels, with the same numbers.

    Only what these layers call is replaced, in this model alone: the gated delta rules of Qwen3-Next, Qwen3.5,
    OLMo-hybrid and Kimi Linear, the scans of Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2, the short
    convolutions of all of them and of LFM2. Weights, caches, masks, ``generate`` and training stay transformers' own.
    Packed documents, by ``position_ids`` that start anew, ``cu_seq_lens_q`` or ``seq_idx``, are kept apart in all
    layers. Tensors on other devices take transformers' functions as before.

    Args:
        model: a model whose parameters are on the CPU, or a part of it.

    Returns:
        What was replaced and what was not; its ``undo`` restores the model exactly, and so does the end of a block
        ``with cpu_kernels(model):``.

    Raises:
        MixerError: the model has no such layer, runs on the kernels already or is not on the CPU, or the kernels
            were not built.
    """
    why = cpu.why_not()
    if why:
        _refuse(why)
    found = CpuKernels(model, {}, {}, [], [])
    plans: list[tuple[nn.Module, MethodType]] = []
    owners: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if hasattr(module.__dict__.get("forward"), MARK):
            _refuse(f"{name or 'the model'} runs on the kernels already; undo that first")
        functions, keeps = _look_up(module)
        if keeps:
            found.kept[name] = keeps
        elif functions:
            _check_device(name, module)
            plans.append((module, _bind(module, functions)))
            found.replaced[name] = functions
            owner = _owner(model, name)
            if owner is not None:
                owners[id(owner)] = owner
    if not plans:
        said = "; ".join(f"{name}: {why}" for name, why in list(found.kept.items())[:1]) or f"known are {KNOWN}"
        _refuse(f"{type(model).__name__} has no recurrent layer that the kernels can run ({said})")
    for module, method in plans:
        module.__dict__["forward"] = method
    found._methods.extend(plans)
    found._hooks.extend(
        owner.register_forward_pre_hook(partial(separate_documents, _arguments(type(owner))), with_kwargs=True)
        for owner in owners.values()
    )
    for outer in model.modules():
        if type(outer).__name__ == KEEPS_KWARGS:
            found._hooks.append(outer.register_forward_pre_hook(hand_documents, with_kwargs=True))
            found._hooks.append(outer.register_forward_hook(end_documents, always_call=True))
    return found


def _refuse(why: str) -> NoReturn:
    raise MixerError(f"cpu_kernels: {why}.")


def _look_up(module: nn.Module) -> tuple[tuple[str, ...], str]:
    """Return the functions of a layer that have a kernel, or why the layer runs as before."""
    kind = type(module)
    forward = inspect.unwrap(kind.forward)
    if not isinstance(forward, FunctionType):
        return (), ""
    called = set(forward.__code__.co_names) & forward.__globals__.keys()
    if not called.isdisjoint(MAMBA_1):
        return (), "Mamba-1 has no kernel here"
    functions = tuple(name for name in FUNCTIONS if name in called)
    family = kind.__module__.split(".")
    if not functions and kind.__name__ != GATE:
        return (), ""
    if family[:2] != ["transformers", "models"] or family[2] not in FAMILIES:
        return (), f"{kind.__module__} is not among {KNOWN}"
    if "forward" in module.__dict__:
        return (), "its forward was replaced by something else"
    for name in functions:
        if not _fits(forward.__globals__[name], name):
            return (), f"{name} of this version of transformers takes other arguments"
    return functions or ("forward",), ""


def _fits(theirs: Any, name: str) -> bool:
    """Return whether a function of transformers takes the arguments that it had when ours was written.

    With the package ``kernels`` it is a module, shared by all models of the process.
    """
    if isinstance(theirs, nn.Module):
        takes = _arguments(type(theirs))
    else:
        takes = tuple(inspect.signature(inspect.unwrap(theirs)).parameters)
    return takes[: len(ARGUMENTS[name])] == ARGUMENTS[name]


def _check_device(name: str, module: nn.Module) -> None:
    for part, tensor in module.named_parameters():
        if not tensor.is_cpu:
            _refuse(f"{name}.{part} is on {tensor.device}; move the model to the CPU first")


def _bind(module: nn.Module, functions: tuple[str, ...]) -> MethodType:
    """Return the module's ``forward`` with these of the functions that it calls replaced."""
    kind: Any = type(module)
    if kind.__name__ == GATE:
        new = FunctionType(run_gate.__code__, run_gate.__globals__, "forward", run_gate.__defaults__)
    else:
        where = inspect.unwrap(kind.forward).__globals__
        new = _rebuild(kind.forward, {name: replace_function(name, where[name], module) for name in functions})
    setattr(new, MARK, True)
    return MethodType(new, module)


def _rebuild(function: Any, replaced: dict[str, Any]) -> FunctionType:
    """Copy a function with other globals, inside the decorators around it, which are copied too."""
    inner = getattr(function, "__wrapped__", None)
    where, closure = function.__globals__ | (replaced if inner is None else {}), function.__closure__
    if inner is not None:
        new = _rebuild(inner, replaced)
        where = function.__globals__
        closure = tuple(CellType(new) if cell.cell_contents is inner else cell for cell in closure)
    code = function.__code__.replace()  # compilers keep what they compiled by code, whatever its globals
    copy = FunctionType(code, where, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__dict__.update(function.__dict__ | ({} if inner is None else {"__wrapped__": new}))
    return copy


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """Return the innermost model of transformers around a layer, which reads positions and makes masks."""
    parts = name.split(".")
    for n in range(len(parts) - 1, -1, -1):
        module = model.get_submodule(".".join(parts[:n]))
        if hasattr(module, "config") and "inputs_embeds" in _arguments(type(module)):
            return module
    return None


def _arguments(kind: Any) -> tuple[str, ...]:
    """Return the names of the arguments of ``forward`` of a class, in order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def hand_documents(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep what a model is told of documents for the model inside it."""
    _handed.set({name: kwargs[name] for name in DOCUMENTS if kwargs.get(name) is not None})


def end_documents(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forget what ``hand_documents`` kept."""
    _handed.set(None)


def separate_documents(
    names: tuple[str, ...], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    """Tell each layer of a model which tokens start a document, before its ``forward`` runs.

    Softmax layers get a mask of blocks, recurrent layers ``seq_idx``. Where ``attention_mask`` is False, tokens become
    documents of their own.

    Args:
        names: the arguments of ``forward``.

    Raises:
        MixerError: documents are given in two ways that differ, or together with a cache.
    """
    given = (_handed.get() or {}) | dict(zip(names, args, strict=False)) | kwargs
    x = given.get("input_ids")
    x = given.get("inputs_embeds") if x is None else x
    if not isinstance(x, Tensor) or not x.is_cpu or x.ndim < 2 or x.shape[1] < 2:
        return None
    starts = _find_documents(given, x)
    if starts is None:
        return None
    given = {name: a for name, a in given.items() if name not in ENDS}  # seq_idx stands for them
    if given.get("use_cache") or _has_cache(given):
        _refuse("packed documents cannot go into a cache; call the model with use_cache=False")
    index = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
    within = index - torch.where(starts, index, 0).cummax(1).values
    given |= {"seq_idx": starts.cumsum(1).int(), "use_cache": False}
    if "position_ids" in names:
        given["position_ids"] = within if given.get("position_ids") is None else given["position_ids"]
        mask = given.get("attention_mask")
        if mask is None or isinstance(mask, Tensor) and mask.ndim == 2:
            given["attention_mask"] = _block_mask(module, x, within)
    return (), given


def _has_cache(given: dict[str, Any]) -> bool:
    return any(given.get(name) is not None for name in CACHE_NAMES)


def _block_mask(module: Any, x: Tensor, within: Tensor) -> Any:
    """Build transformers' causal mask for documents, given the positions (B, T) inside them."""
    from transformers.masking_utils import create_causal_mask

    shape = x.new_empty(*x.shape[:2], 0, dtype=module.dtype)
    return create_causal_mask(module.config, shape, None, None, position_ids=within)  # neither mask nor cache


def _find_documents(given: dict[str, Any], x: Tensor) -> Tensor | None:
    """Return at which tokens (B, T) documents start, or None where there is one in each row."""
    (B, T), mask = x.shape[:2], given.get("attention_mask")
    starts = find_starts(given, B, T, x.device)
    positions = given.get("position_ids")
    if positions is not None and positions.ndim == 3:  # Qwen3.5's: those of texts, before three of images
        positions = positions[0] if len(positions) == 4 else None
    if starts is None and positions is None:
        return None
    valid = torch.ones(B, T, dtype=torch.bool, device=x.device)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        valid = mask[:, -T:].bool()
    both = valid[:, 1:] & valid[:, :-1]
    if positions is not None and (mask is None or isinstance(mask, Tensor) and mask.ndim == 2 or starts is not None):
        steps = positions.expand(B, -1).diff()
        anew = (steps < 1 if _has_cache(given) else steps != 1) & both  # as transformers reads positions
        if bool(anew.any()):
            if starts is None:
                starts = torch.ones(B, T, dtype=torch.bool, device=x.device)
                starts[:, 1:] = anew
            elif bool((starts[:, 1:] & both != anew).any()):
                _refuse("position_ids start anew at other tokens than the documents given beside them")
    if starts is None:
        return None
    starts[:, 1:] |= valid[:, 1:] != valid[:, :-1]
    return starts if bool(starts[:, 1:].any()) else None
