"""The tester's door: jobs run in a test under virtual time, by the real adapters, and without a server."""

from .explaining import Explanation, explain
from .virtual import Job, NothingRan, VirtualTime, virtual_time

__all__ = ["Explanation", "Job", "NothingRan", "VirtualTime", "explain", "virtual_time"]
