"""The app of a worker process."""

from tests.on_celery.project import Settings, make_app

app = make_app(Settings.from_env())
app.set_current()
