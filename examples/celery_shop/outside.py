"""The world outside the shop, so that it runs by itself: a bank, a warehouse, a mail server and a CRM."""

from pathlib import Path


class CardStolen(Exception):
    """Whoever pays with this card is to be looked at."""


class Declined(Exception):
    """The card cannot pay."""


class Busy(Exception):
    """The bank wants to be asked again later."""

    retry_after = "PT1S"


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
    """Ask the warehouse; nothing is packed when it is asked first."""
    return not _first_time(f"order-{order}-packed")


def send_mail(order: int, address: str) -> None:
    """Send a receipt."""
    print(f"sent the receipt of order {order} to {address}")


def tell_crm(order: int) -> None:
    """Tell the CRM of an order; it is down as long as the file `crm-is-down` exists."""
    if Path("crm-is-down").exists():
        raise ConnectionError("the CRM is down")
    print(f"the CRM knows order {order}")


def _first_time(name: str) -> bool:
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
