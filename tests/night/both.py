"""Both apps with one bridge, for `ojs-bridge serve`: it sends the jobs of both back to their queues."""

from __future__ import annotations

from tests.night import celery_app, dramatiq_app
from tests.night.settings import Settings

_settings = Settings.from_env()
bridge = _settings.bridge()
broker = dramatiq_app.make_broker(_settings, bridge)
app = celery_app.make_app(_settings, bridge)
