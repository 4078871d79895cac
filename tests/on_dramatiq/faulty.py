"""The application in a process whose steps are to raise."""

from tests import faults
from tests.on_dramatiq.app import *  # noqa: F403 - it is that application

#: The steps of a Dramatiq job that are Dramatiq's alone.
OWN = [
    "dramatiq.middleware:OJSRetries._begin",
    "dramatiq.middleware:Execution.__init__",
    "dramatiq.actors:Actors.of_message",
    "dramatiq.execution:Execution.begin",
    "dramatiq.execution:Execution._ask",
    "dramatiq.execution:bare_job",
    "dramatiq.execution:max_age",
    "dramatiq.execution:carry_wishes",
    "dramatiq.execution:names_exceptions",
    "dramatiq.execution:job_of",
    "dramatiq.execution:publication",
    "dramatiq.translate:decoded",
    "dramatiq.receiving:_flaw",
    "dramatiq.on_redis:Hands.take",
]
faults.arm([*faults.STEPS, *OWN])
