"""An online shop on Django and Celery."""

from .celery import app

__all__ = ["app"]
