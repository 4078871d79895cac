"""Moving a fleet: the plan, shadow mode, the retries of other systems, and the way back."""

from .native import NativeOptions, to_celery_options, to_dramatiq_options
from .presets import PRESETS, Preset, preset
from .shadowing import shadow

__all__ = [
    "PRESETS",
    "NativeOptions",
    "Preset",
    "preset",
    "shadow",
    "to_celery_options",
    "to_dramatiq_options",
]
