"""What torch does to mixers: graphs of any length, meta tensors, derivatives of derivatives."""

from __future__ import annotations

import math

import torch

import tokenmix

from . import attempt


def _said(name: str, call: object) -> str:
    try:
        return call()
    except Exception as error:
        return f"{name} {type(error).__name__}"


@attempt("9", "torch.compile(dynamic=True, fullgraph=True) of Hydra, Poly-NL and External")
def dynamic_graphs() -> str:
    """Their eps is a symbol then."""

    def one(name: str, **options: object) -> str:
        torch._dynamo.reset()
        mixer = tokenmix.build_mixer(name, 8, **options)
        fast = torch.compile(mixer, backend="aot_eager", fullgraph=True, dynamic=True)
        off = max(
            float((fast(x) - mixer(x)).detach().abs().max()) for x in (torch.randn(2, 10, 8), torch.randn(2, 7, 8))
        )
        return f"{name} off by {off:.0e}"

    return ", ".join(
        _said(name, lambda n=name, o=options: one(n, **o))
        for name, options in (("hydra", {}), ("polynl", {}), ("external", {"slots": 5}))
    )


@attempt("15", "Reformer and Routing on the meta device")
def on_meta() -> str:
    """Autocast is not defined there."""

    def one(name: str) -> str:
        with torch.device("meta"):
            mixer = tokenmix.build_mixer(name, 8, heads=2)
        return f"{name} {tuple(mixer(torch.randn(2, 10, 8, device='meta')).shape)}"

    return ", ".join(_said(name, lambda n=name: one(n)) for name in ("reformer", "routing"))


@attempt("15", "tokenmix list --cost with a length of 14 digits; bench --budget nan")
def command_line() -> str:
    """The tables of a mixer of that length were made."""
    from tokenmix.lab.cli.bench import check_positive
    from tokenmix.lab.cli.costs import costs, costs_text

    def listed() -> str:
        T = 99_999_999_999_999
        return f"list: {len(costs_text(costs(T, 64), T, 64).splitlines())} lines"

    def budget() -> str:
        check_positive(budget=math.nan)
        return "bench: accepted"

    return ", ".join([_said("list", listed), _said("bench", budget)])


@attempt("10", "torch.func.jvp of float32 softmax attention and what is made of it")
def forward_derivatives() -> str:
    """Torch's fused attention has no forward derivative."""

    def one(name: str, **options: object) -> str:
        torch.manual_seed(0)
        mixer, x, t = tokenmix.build_mixer(name, 8, **options), torch.randn(2, 10, 8), torch.randn(2, 10, 8)
        found = torch.func.jvp(mixer, (x,), (t,))[1]
        want = torch.func.jvp(mixer.double(), (x.double(),), (t.double(),))[1]
        return f"{name} {'right' if float((found - want).abs().max()) < 1e-4 else 'wrong'}"

    rows = {
        "attention": {"heads": 2},
        "linformer": {"heads": 2, "max_len": 10, "rank": 3},
        "set": {"heads": 2, "points": 3},
        "simplified_attention": {},
    }
    return ", ".join(_said(name, lambda n=name, o=options: one(n, **o)) for name, options in rows.items())


@attempt("10", "A second derivative of float32 softmax attention by torch.autograd.grad(create_graph=True)")
def second_derivative() -> str:
    """Torch's fused kernel has none."""
    torch.manual_seed(0)
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        mixer, x = (
            tokenmix.build_mixer("attention", 16, heads=2, causal=True).to(dtype),
            torch.randn(2, 9, 16).to(dtype).requires_grad_(),
        )
        first = torch.autograd.grad(mixer(x).square().sum(), x, create_graph=True)[0]
        found.append(torch.autograd.grad(first.square().sum(), x)[0])
    return f"off by {float((found[1] - found[0]).abs().max() / found[0].abs().max()):.0e}"
