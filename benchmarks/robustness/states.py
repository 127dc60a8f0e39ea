"""Streaming states that are not what the mixer wrote."""

from __future__ import annotations

import torch

import tokenmix

from . import attempt


def _narrowed(name: str, dtype: torch.dtype, **options: object) -> str:
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer(name, 16, causal=True, **options).eval(), torch.randn(2, 20, 16)
    with torch.no_grad():
        y, state = mixer(x), mixer.extend(x[:, :10], mixer.init_state(2))[1]
        state = type(state)(*(a.to(dtype) if a.is_floating_point() else a for a in state))
        off = (mixer.extend(x[:, 10:11], state)[0] - y[:, 10:11]).abs().max()
    return f"off by {float(off):.1e}"


@attempt("1", "Hydra streams on from a state kept in float32")
def hydra_float32() -> str:
    """Its C kernel took every buffer for float64."""
    return _narrowed("hydra", torch.float32)


@attempt("1", "Linear attention streams on from a state kept in float32")
def linear_float32() -> str:
    """The same."""
    return _narrowed("linear", torch.float32, heads=2)


@attempt("1", "Hydra with the mean streams on from a count in int32")
def hydra_count() -> str:
    """The C kernel took it for int64."""
    torch.manual_seed(0)
    mixer, x = tokenmix.build_mixer("hydra", 16, causal=True, feature="mean").eval(), torch.randn(2, 20, 16)
    with torch.no_grad():
        y, state = mixer(x), mixer.extend(x[:, :10], mixer.init_state(2))[1]
        state = state._replace(**{name: a.int() for name, a in state._asdict().items() if not a.is_floating_point()})
        try:
            return f"off by {float((mixer.extend(x[:, 10:11], state)[0] - y[:, 10:11]).abs().max()):.1e}"
        except ValueError as error:
            return f"refused: {error}"


@attempt("3", "States of one mixer given to another")
def foreign() -> str:
    """Every pair of a few mixers."""
    options: dict[str, dict] = {
        "aft_simple": {},
        "hydra": {},
        "polynl": {},
        "linear": {"heads": 2},
        "performer": {"heads": 2},
    }
    options |= {
        "lightconv": {"heads": 2},
        "pooling": {"window": 5},
        "attention": {"heads": 2},
        "aft_full": {"max_len": 32},
        "strided": {"heads": 2, "stride": 3},
    }
    options |= {
        "aft_local": {"max_len": 32, "window": 4},
        "aft_conv": {"heads": 2, "kernel_size": 5},
        "gmlp": {"max_len": 32},
        "external": {"slots": 4},
    }
    mixers = {name: tokenmix.build_mixer(name, 16, causal=True, **given).eval() for name, given in options.items()}
    x, told = torch.randn(2, 6, 16), {"taken without a word": 0, "a raw error": 0, "refused in one line": 0}
    with torch.no_grad():
        for giver, a in mixers.items():
            for taker, b in mixers.items():
                if giver != taker:
                    try:
                        b.extend(x, a.extend(x, a.init_state(2))[1])
                        told["taken without a word"] += 1
                    except tokenmix.MixerError:
                        told["refused in one line"] += 1
                    except Exception:
                        told["a raw error"] += 1
    return ", ".join(f"{n} {what}" for what, n in told.items())
