"""Moving a fleet: the plan, the retries of other systems, and the way back."""

from .native import NativeOptions, to_celery_options, to_dramatiq_options
from .presets import PRESETS, Preset, preset

__all__ = ["PRESETS", "NativeOptions", "Preset", "preset", "to_celery_options", "to_dramatiq_options"]
