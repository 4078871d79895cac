"""Fails as a client library would: with an error from five calls down."""


def call_the_other_side(calls: int = 5) -> None:
    """Raise ValueError, so many calls down."""
    if calls:
        call_the_other_side(calls - 1)
    else:
        raise ValueError("the other side answered with status 503")
