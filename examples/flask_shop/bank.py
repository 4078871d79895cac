"""The bank, so that the shop runs by itself: it answers when it is asked again, and knows stolen cards."""

from pathlib import Path


class CardStolen(Exception):
    """The bank reports the card as stolen."""


def charge(order: int, card: str) -> None:
    """Have the bank charge a card."""
    if card == "stolen":
        raise CardStolen("reported stolen")
    try:
        Path(f"order-{order}-asked").touch(exist_ok=False)
    except FileExistsError:
        print(f"charged order {order}", flush=True)
    else:
        raise TimeoutError("the bank does not answer")
