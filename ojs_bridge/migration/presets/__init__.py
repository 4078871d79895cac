"""What other systems' retries look like: each one's schedule, jitter, cap and count as a policy."""

from .preset import Preset
from .systems import PRESETS, preset

__all__ = ["PRESETS", "Preset", "preset"]
