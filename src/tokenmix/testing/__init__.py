"""The contract suite: the promises of every mixer, as functions that run on any mixer.

In a test of your own: ``check_mixer(MyMixer, {"window": 3, "causal": True}, reference=my_equation)``;
``check_recurrence(my_kernel, "fla")`` for a kernel with the signature of a known one; ``check_model(model)`` for whole
models.
"""

from .cli import main_check
from .inputs import adversarial_keys
from .models import MODEL_PROMISES, check_model
from .recurrences import RECURRENCE_PROMISES, check_recurrence
from .report import ContractError, PromiseReport, Result
from .subject import Subject, freeze, perturb, subject
from .suite import NEVER_WAIVED, PLAIN_PROMISES, PROMISES, check_mixer, run_promise, run_promises

__all__ = [
    "ContractError",
    "MODEL_PROMISES",
    "NEVER_WAIVED",
    "PLAIN_PROMISES",
    "PROMISES",
    "PromiseReport",
    "RECURRENCE_PROMISES",
    "Result",
    "Subject",
    "adversarial_keys",
    "check_mixer",
    "check_model",
    "check_recurrence",
    "freeze",
    "main_check",
    "perturb",
    "run_promise",
    "run_promises",
    "subject",
]
