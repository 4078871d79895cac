"""The health over HTTP, for probes."""

from __future__ import annotations

from pathlib import Path

from ojs_bridge.http.guarding import LOOPBACK, Access, Buckets, tokens_of
from tests.http.doors import API, LETTERS, OPERATOR, client_at, house, with_token
from tests.http.test_letters import refused

HEALTH = f"{API}/health"


def test_a_probe(tmp_path: Path) -> None:
    """A probe needs no token, and then hears the status alone; nothing else is open."""
    door = house(f"sqlite:///{tmp_path}/ojs.db")
    whole = door.client.get(HEALTH).json()
    assert (whole["status"], set(whole["checks"])) == (
        "degraded",
        {"store", "broker", "workers", "backlog", "waiting", "holds"},
    )
    client = client_at(door.bridge, Access(tokens_of(OPERATOR), LOOPBACK, probes=Buckets(20, 0.001)))
    answer = client.get(HEALTH, headers={"Host": "10.0.0.7:8787"})
    assert (answer.status_code, answer.json()) == (200, {"status": "degraded"})
    assert "checks" in client.get(HEALTH, headers=with_token(OPERATOR)).json()
    assert client.get(HEALTH, headers=with_token("wrong")).status_code == 401
    for path in (f"{LETTERS}/x/health", f"{LETTERS}/health", f"{API}/health/", f"{API}//health"):
        assert client.get(path).status_code == 401
    assert client.post(HEALTH).status_code == 401
    door.outbox.raises = ConnectionError("down")
    told = refused(client.get(HEALTH), 503, "backend_error")
    assert told["details"] == {"status": "away"}
    told = refused(client.get(HEALTH, headers=with_token(OPERATOR)), 503, "backend_error")
    broker = told["details"]["checks"]["broker"]
    assert (broker["status"], broker["message"], broker["away_since"][:2]) == ("away", "down", "20")
    assert {client.get(HEALTH).status_code for _ in range(30)} == {503, 429}
