"""The Celery app, under the bridge: every task, whatever library it comes from."""

import os

from celery import Celery

from ojs_bridge.celery import install

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
bridge = install(app)
