"""Moving a fleet: what its tasks do today, what they will do under the bridge, and both side by side."""

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
