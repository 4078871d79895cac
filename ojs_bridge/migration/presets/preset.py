"""What a preset is."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import NotExpressible
from ...spec.policy import RetryPolicy


@dataclass(frozen=True, slots=True)
class Preset:
    """Another system's retries: `policy` goes wherever a policy does, `notes` say where it differs."""

    name: str
    policy: RetryPolicy
    notes: str

    @property
    def expressible(self) -> bool:
        """Whether the Open Job Spec can say this very schedule, so that `policy.to_ojs()` works."""
        try:
            self.policy.to_ojs()
        except NotExpressible:
            return False
        return True
