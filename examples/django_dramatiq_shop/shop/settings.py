"""The settings, the bridge's among them."""

import os

SECRET_KEY = "an example has none"  # noqa: S105
DEBUG = True
ALLOWED_HOSTS = ["*"]
ROOT_URLCONF = "shop.urls"
INSTALLED_APPS = ["django_dramatiq", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

DRAMATIQ_BROKER = {
    "BROKER": "dramatiq.brokers.redis.RedisBroker",
    "OPTIONS": {"url": os.environ.get("BROKER_URL", "redis://localhost:6379/0")},
    "MIDDLEWARE": [
        "dramatiq.middleware.AgeLimit",
        "dramatiq.middleware.TimeLimit",
        "dramatiq.middleware.Callbacks",
        "ojs_bridge.dramatiq.OJSRetries",
        "django_dramatiq.middleware.AdminMiddleware",
        "django_dramatiq.middleware.DbConnectionsMiddleware",
    ],
}

OJS_BRIDGE = {
    # For one host. In Kubernetes this file is gone with its pod, and what it keeps: name a PostgreSQL there.
    "store": "sqlite:///dead-letters.db",
    # Every failure of every task is retried, four times: without max_attempts tasks keep their own retries.
    "retry": {"max_attempts": 5, "initial_interval": "PT0.5S", "on_exhaustion": "dead_letter"},
    "errors": {
        "TimeoutError": "external.timeout",
        "bank.CardStolen": ("payment.card_stolen", "DEAD_LETTER"),
    },
}
