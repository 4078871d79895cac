"""The eight faults of a night: how each begins, which alerts it calls for, and how it is mended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.night.fleet import HOSTS, House

#: The hosts that die: more than half.
DEAD = HOSTS[:2]


@dataclass(frozen=True)
class Fault:
    """A fault.

    `needs` are the alerts that must fire, one of each; `may` are others that may. `level` is what the verdict
    must say meanwhile. It lasts until all this was told, for at most `patience` seconds. The link of the
    alert `by` must lead to the `cause`, a pattern, and from there clicks on `steps`, selectors, to the mend.
    Where the page cannot mend it, `elsewhere` says what does. Letters of a `type` are replayed in the end.
    """

    name: str
    title: str
    begin: Callable[[House], None]
    end: Callable[[House], None]
    needs: tuple[tuple[str, ...], ...]
    may: tuple[str, ...]
    level: tuple[str, ...]
    by: str
    cause: str
    steps: tuple[str, ...] = ()
    elsewhere: str = ""
    patience: float = 240.0
    type: str = ""

    @property
    def expected(self) -> set[str]:
        """The alerts that are not false."""
        return {name for names in self.needs for name in names} | {*self.may}


def bank_down(house: House) -> None:
    """Have the bank answer 503."""
    house.bank.is_down = True


def bank_up(house: House) -> None:
    """Have it answer again."""
    house.bank.is_down = False


def deploy(house: House) -> None:
    """Deploy a version that reads a field that no order has, and mark it."""
    house.asked("POST", "marks", {"text": "mail v42"})
    house.settings.switch("deploy").touch()


def roll_back(house: House) -> None:
    """Deploy the version before."""
    house.settings.switch("deploy").unlink()
    house.asked("POST", "marks", {"text": "mail v41 again"})


def hosts_die(house: House) -> None:
    """Kill two hosts of three."""
    for host in DEAD:
        house.kill_host(host)


def hosts_live(house: House) -> None:
    """Start them again."""
    for host in DEAD:
        house.start_host(host)


def poison(house: House) -> None:
    """Send two jobs that kill the process that runs them."""
    for _ in range(2):
        house.shop.send("images.scale", image="poison.png")


def flood(house: House) -> None:
    """Let reports be slow, and send more of them than the fleet builds in an hour."""
    house.settings.switch("slow").touch()
    for _ in range(3000):
        house.shop.send("reports.build")


def drain(house: House) -> None:
    """Let reports be fast again."""
    house.settings.switch("slow").unlink()


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            *("dependency", "The bank is down", bank_down, bank_up),
            needs=(("OjsBreakerOpen",),),
            may=("OjsNewErrors", "OjsManyRetries", "OjsErrorCameBack"),
            level=("bad", "slow"),
            by="OjsBreakerOpen",
            cause="bank",
            elsewhere="its breaker holds its jobs",
            patience=480,
            type="billing.charge",
        ),
        Fault(
            *("deploy", "A deploy breaks the mails", deploy, roll_back),
            needs=(("OjsJobsDie",),),
            may=("OjsNewErrors", "OjsManyRetries", "OjsErrorCameBack"),
            level=("bad",),
            by="OjsJobsDie",
            cause="postcode",
            steps=(
                "#groups a:has-text('postcode')",
                "button:has-text('Pause mail.send')",
                "#question [type=submit]",
            ),
            type="mail.send",
        ),
        Fault(
            *("fleet", "Two hosts of three die", hosts_die, hosts_live),
            needs=(("OjsHalfTheHostsSilent",), ("OjsHostSilent",)),
            may=("OjsTargetDown",),
            level=("bad", "slow"),
            by="OjsHalfTheHostsSilent",
            cause="alder",
            elsewhere="start the hosts",
            patience=360,
        ),
        Fault(
            *("poison", "Two jobs kill their workers", poison, lambda _: None),
            needs=(("OjsNewErrors",),),
            may=(),
            level=("well", "bad", "slow"),
            by="OjsNewErrors",
            cause="lost|killed|died",
            steps=(
                "#groups li:has-text('images.scale') .menu summary",
                "#groups li:has-text('images.scale') .menu button:has-text('Delete letters')",
                "#question [type=submit]",
            ),
        ),
        Fault(
            *(
                "store",
                "The store is away",
                lambda house: house.store.kill(),
                lambda house: house.store.start(),
            ),
            needs=(("OjsStoreAway",),),
            may=(),
            level=("away",),
            by="OjsStoreAway",
            cause="store is away",
            elsewhere="start the store",
        ),
        Fault(
            *("broker", "The broker is away", lambda house: house.broker.kill(), lambda h: h.broker.start()),
            needs=(("OjsBrokerAway",),),
            may=(),
            level=("away", "bad"),
            by="OjsBrokerAway",
            cause="broker is away",
            elsewhere="start the broker",
        ),
        Fault(
            *(
                "serve",
                "ojs-bridge serve is dead",
                lambda house: house.end_serve(),
                lambda house: house.serve(),
            ),
            needs=(("OjsServerGone",),),
            may=(),
            level=("gone",),
            by="OjsServerGone",
            cause="",
            elsewhere="start it",
        ),
        Fault(
            *("backlog", "More reports come than are built", flood, drain),
            needs=(("OjsBacklogGrows", "OjsBacklogOld"),),
            may=("OjsBacklogStands", "OjsBacklogGrows", "OjsBacklogOld"),
            level=("slow", "bad"),
            by="OjsBacklogGrows",
            cause="reports",
            elsewhere="start workers",
            patience=1200,
        ),
    )
}
