"""The contract suite: what every mixer promises, as functions that run on any mixer.

In a test of your own: ``check_mixer(MyMixer, {"window": 3, "causal": True}, reference=my_equation)``.
"""

from .cli import main_check as main_check
from .inputs import adversarial_keys as adversarial_keys
from .report import ContractError as ContractError
from .report import Report as Report
from .report import Result as Result
from .subject import Subject as Subject
from .subject import freeze as freeze
from .subject import perturb as perturb
from .subject import subject as subject
from .suite import NEVER_WAIVED as NEVER_WAIVED
from .suite import PLAIN_PROMISES as PLAIN_PROMISES
from .suite import PROMISES as PROMISES
from .suite import check_mixer as check_mixer
from .suite import run_promise as run_promise
from .suite import run_promises as run_promises
