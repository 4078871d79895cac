"""The world outside the shop, so that it runs by itself: a bank, a warehouse, a mail server and a CRM."""

from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

CARDS = ("good", "busy", "good", "declined", "good", "good", "stolen", "good", "busy", "good")


class CardStolen(Exception):
    """The bank reports the card as stolen."""


class Declined(Exception):
    """The card cannot pay."""


class Busy(Exception):
    """The bank cannot answer now."""

    retry_after = "PT1S"


class NotPacked(Exception):
    """The warehouse needs a moment."""


def new_orders(number: int) -> Iterator[tuple[int, str]]:
    """Yield so many customers' orders, each with a number of its own and a card."""
    free = (order for order in count(1) if _first_time(f"order-{order}-placed"))
    for order in islice(free, number):
        yield order, CARDS[order % len(CARDS)]


def charge(order: int, card: str) -> None:
    """Have the bank charge a card."""
    match card:
        case "stolen":
            raise CardStolen("reported stolen")
        case "declined":
            raise Declined("insufficient funds")
        case "busy" if _first_time(f"order-{order}-busy"):
            raise Busy("429")
    print(f"charged order {order}")


def is_packed(order: int) -> bool:
    """Ask the warehouse; the first time it says no."""
    return not _first_time(f"order-{order}-packed")


def send_mail(order: int, address: str) -> None:
    """Send a receipt."""
    print(f"sent the receipt of order {order} to {address}")


def tell_crm(order: int) -> None:
    """Tell the CRM of an order; it is down as long as the file `crm-is-down` exists."""
    if Path("crm-is-down").exists():
        raise ConnectionError("the CRM is down")
    print(f"the CRM knows order {order}")


def book(order: int) -> None:
    """Enter an order in the books and print the page; the printer jams at every tenth."""
    print(f"booked order {order}")
    if order % 10 == 0:
        raise OSError("the printer is jammed")


def _first_time(name: str) -> bool:
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
