"""Imported before Dramatiq, which reads then how long an idle worker sleeps."""

import os

os.environ.update(dramatiq_worker_timeout="50")
