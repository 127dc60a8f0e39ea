"""The tolerances of the contract suite: errors relative to max|want|, unless the promise says otherwise.

An error is max|got - want|.
"""

from __future__ import annotations

import torch

BY_DTYPE = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 6e-3,
    torch.bfloat16: 5e-2,
}
"""Two ways to the same number, by the dtype they are computed in."""

INFLUENCE = 1e-6
"""The most that a token that may not be attended may change: sums in another order, nothing more."""

ADVERSARIAL = 1e-5
"""float32 against the float64 reference on adversarial keys, forward and gradients, measured on the functional form."""

LOGIT_EPS = 4 * torch.finfo(torch.float32).eps
"""Added to ADVERSARIAL for each unit of the largest logit, for mixers that weigh by dot products."""

REACH = 1e-4
"""The least that a token that may be attended must change."""
