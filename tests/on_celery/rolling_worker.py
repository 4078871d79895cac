"""The app of a worker of either side."""

from tests.on_celery.rolling import Side, make_app

app = make_app(Side.from_env())
