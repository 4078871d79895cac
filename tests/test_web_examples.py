"""The shops on Flask and FastAPI, each with its web server and its worker."""

from __future__ import annotations

import pytest

from tests.shops import EXAMPLES, Shop

pytest.importorskip("flask")
pytest.importorskip("fastapi")


def test_flask(valkey_url: str) -> None:
    """The shop runs on Celery, with its settings in a pyproject.toml."""
    worker = "python -m celery -A shop worker --loglevel INFO --concurrency 2"
    with Shop("flask_shop", valkey_url, worker, "python -m flask --app shop:web run --port {}") as shop:
        shop.sells(order="/orders/{number}", task="shop.charge")


def test_fastapi(valkey_url: str) -> None:
    """The shop runs on Dramatiq, with its settings in variables, and a file of policies."""
    with Shop(
        "fastapi_shop",
        valkey_url,
        "python -m dramatiq shop --processes 1 --threads 2",
        "python -m uvicorn shop:web --port {}",
        OJS_BRIDGE_STORE="sqlite:///dead-letters.db",
        OJS_BRIDGE_POLICIES="policies.toml",
    ) as shop:
        shop.sells(order="/orders/{number}?card={card}", task="charge")


def test_all_shops_have_the_same_bank() -> None:
    """The files that are not about a framework are the same."""
    names = ("django_shop", "django_dramatiq_shop", "flask_shop", "fastapi_shop")
    assert len({(EXAMPLES / name / "bank.py").read_text() for name in names}) == 1
