"""The tester's door: jobs run in a test under virtual time, by the real adapters, and without a server."""

from .entering import virtual_time
from .explaining import Explanation, explain
from .jobs import Job
from .virtual import NothingRan, VirtualTime

__all__ = ["Explanation", "Job", "NothingRan", "VirtualTime", "explain", "virtual_time"]
