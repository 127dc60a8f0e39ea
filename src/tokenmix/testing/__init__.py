"""The contract suite: the promises of every mixer, as functions that run on any mixer.

In a test of your own: ``check_mixer(MyMixer, {"window": 3, "causal": True}, reference=my_equation)``.
"""

from .cli import main_check
from .inputs import adversarial_keys
from .report import ContractError, PromiseReport, Result
from .subject import Subject, freeze, perturb, subject
from .suite import NEVER_WAIVED, PLAIN_PROMISES, PROMISES, check_mixer, run_promise, run_promises

__all__ = [
    "ContractError",
    "NEVER_WAIVED",
    "PLAIN_PROMISES",
    "PROMISES",
    "PromiseReport",
    "Result",
    "Subject",
    "adversarial_keys",
    "check_mixer",
    "freeze",
    "main_check",
    "perturb",
    "run_promise",
    "run_promises",
    "subject",
]
