"""Open Job Spec retry semantics for Celery and Dramatiq fleets that already run."""
