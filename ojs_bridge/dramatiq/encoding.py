"""Messages with options that cannot travel, because a middleware left more there than an encoder knows."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy

logger = logging.getLogger("ojs_bridge")


def encodable(message: MessageProxy | dramatiq.Message[Any]) -> dramatiq.Message[Any]:
    """Return the message without options that cannot travel, which only this process can have added.

    Raises what the encoder does when its arguments cannot travel either.
    """
    plain = message._message if isinstance(message, MessageProxy) else message
    try:
        plain.encode()
    except Exception:  # noqa: BLE001 - whatever the application's own encoder raises
        kept = {name: value for name, value in plain.options.items() if _travels(name, value)}
        lost = ", ".join(sorted(plain.options.keys() - kept.keys()))
        plain = dataclasses.replace(plain, options=kept)
        plain.encode()
        logger.warning("job %s: its options %s cannot be encoded and stay behind", plain.message_id, lost)
    return plain


def _travels(name: str, value: Any) -> bool:
    try:
        dramatiq.get_encoder().encode({name: value})
    except Exception:  # noqa: BLE001 - as above
        return False
    return True
