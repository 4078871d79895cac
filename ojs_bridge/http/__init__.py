"""The HTTP API for dead letters and parked retries, by the routes of the Open Job Spec, and its page."""

from .app import app_for, serve

__all__ = ["app_for", "serve"]
