"""The way back: from a retry policy to a framework's own options, with what they lose."""

from .celery import to_celery_options
from .dramatiq import to_dramatiq_options
from .options import NativeOptions

__all__ = ["NativeOptions", "to_celery_options", "to_dramatiq_options"]
