"""The HTTP door: the Open Job Spec's routes for dead letters, and for parked retries, with a page."""

from .app import app_for, serve

__all__ = ["app_for", "serve"]
