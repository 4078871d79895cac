"""Listeners and webhooks hear of groups that are new, came back or grow, once for a whole fleet."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import urlsplit

from ..engine import events
from ..engine.context import Context
from ..engine.events import Event
from ..engine.scheduler import once_a_period
from ..engine.threads import keep_going
from ..errors import ConfigurationError, StoreError
from ..rules.faults import LIVE, State
from ..rules.job import format_time, parse_time
from ..store import Document, Store, next_of, readable
from .group import ErrorGroup
from .groups import Groups

logger = logging.getLogger("ojs_bridge")

Form: TypeAlias = Literal["json", "slack"]
#: The documents that say what was told, how often a fleet looks at its groups, and how long they are kept.
KIND, PERIOD, KEPT = "told", timedelta(seconds=15), timedelta(days=30)
#: After what time a growth is told again, and after how many tries a webhook hears no more of a group.
AGAIN, TRIES = timedelta(hours=1), 10
#: For how long a process that sends keeps others from it, and lets others send after it could not.
SENDS, RESTS = timedelta(seconds=60), 60.0
#: The seconds that a request may take, and the most groups that are told at a time.
PATIENCE, MOST = 5.0, 50
_WORDS: Mapping[str, str] = {"new": "New", "came_back": "Came back", "growing": "Grows"}


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL to which the workers of a fleet post the groups that are new, came back or grow.

    The `form` is `json`, an event's, or `slack`. With a `secret` the header `X-OJS-Signature` has
    `sha256=`, and the HMAC-SHA256 of the header `X-OJS-Timestamp`, a dot and the body. `page_url` is the
    address of the page, to which a message leads. Raises ConfigurationError.
    """

    # The URL of a chat is a secret, too.
    url: str = field(repr=False)
    form: Form = "json"
    secret: str | None = field(default=None, repr=False)
    page_url: str | None = None
    states: Collection[State] = LIVE

    def __post_init__(self) -> None:
        for name in ("url", "page_url"):
            value = getattr(self, name)
            if value is not None and not _is_web(value):
                # It may have a secret in it.
                raise ConfigurationError(f"webhook: {name}: must be an http:// or https:// URL with a host")
            if value is not None and "@" in urlsplit(value).netloc:
                raise ConfigurationError(f"webhook: {name}: must have no user and no password")
        if self.form not in get_args(Form):
            raise ConfigurationError(f"webhook: form: {self.form!r} must be json or slack")
        if self.secret is not None and not (isinstance(self.secret, str) and self.secret):
            raise ConfigurationError("webhook: secret: must be a text that is not empty")
        states = self.states
        if isinstance(states, str) or not isinstance(states, Collection) or not {*states} <= {*LIVE}:
            raise ConfigurationError(f"webhook: states: {states!r} must be some of {', '.join(LIVE)}")

    @property
    def name(self) -> str:
        """The name under which the store knows it: it tells nothing of its URL."""
        return hashlib.sha256(self.url.encode("utf-8", "surrogatepass")).hexdigest()[:12]

    def request(self, event: Event, at: datetime) -> urllib.request.Request:
        """Return the signed request that tells of an event."""
        link = f"{self.page_url.rstrip('/')}/#groups/{event.subject}" if self.page_url else None
        told = slack(event, link) if self.form == "slack" else {**event.to_ojs(), "url": link}
        body, stamp = json.dumps(told).encode(), str(int(at.timestamp()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "ojs-bridge",
            "X-OJS-Event": event.type,
            "X-OJS-Timestamp": stamp,
        }
        if self.secret:
            sign = hmac.new(self.secret.encode(), f"{stamp}.".encode() + body, hashlib.sha256)
            headers["X-OJS-Signature"] = f"sha256={sign.hexdigest()}"
        return urllib.request.Request(self.url, body, headers, method="POST")  # noqa: S310 - checked

    def send(self, event: Event, at: datetime) -> None:
        """Send an event, twice if need be; raises OSError. It follows no redirection."""
        for is_last in (False, True):
            try:
                with _OPENER.open(self.request(event, at), timeout=PATIENCE):
                    return
            except OSError:
                if is_last:
                    raise
                time.sleep(random.uniform(0.5, 1))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow none: the receiver's answer is an error."""


_OPENER = urllib.request.build_opener(_NoRedirect)


def slack(event: Event, link: str | None) -> dict[str, Any]:
    """Return an event in Slack's form."""
    data = event.data
    rate = f"{data['per_minute']:g} die a minute, {data['count']:,} dead, {data['retrying']:,} retry"
    head = f"*{_WORDS[data['state']]}:* `{_plain(data['job_type'])}`  `{_plain(data['error_type'])}`"
    message = f"```\n{_plain(data['message'])}\n```\n" if data["message"] else ""
    text = f"{head}\n{message}{rate}"
    return {"text": f"{text}\n<{link}|Open the group>" if link else text}


def _plain(text: str) -> str:
    """Return a text that stands in Slack's, Mattermost's or Discord's marks of code: nothing in it is markup.

    So no text of a job, such as `@channel`, calls anybody, and no picture is loaded.
    """
    sound = text.encode("utf-8", "replace").decode()[:500].replace("`", "'")
    return sound.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _is_web(url: object) -> bool:
    if not isinstance(url, str) or not url.isascii() or any(char.isspace() for char in url):
        return False
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def checked(webhooks: Iterable[Webhook | str]) -> tuple[Webhook, ...]:
    """Return webhooks, of which one may be a URL alone; raises ConfigurationError."""
    if isinstance(webhooks, str) or not isinstance(webhooks, Iterable):
        raise ConfigurationError(f"webhooks: {type(webhooks).__name__} must be a list of Webhooks")
    made = tuple(Webhook(one) if isinstance(one, str) else one for one in webhooks)
    for one in made:
        if not isinstance(one, Webhook):
            raise ConfigurationError(f"webhooks: {one!r} is not a Webhook")
    return made


class Teller:
    """A thread that tells listeners and webhooks of groups; of many workers one looks in each period."""

    def __init__(self, context: Context, groups: Groups, webhooks: Sequence[Webhook]) -> None:
        self._context, self._groups, self._webhooks = context, groups, webhooks
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        #: Until when, in monotonic seconds, webhooks that failed are left to other processes.
        self._rests: dict[str, float] = {}

    def start(self) -> None:
        """Start the thread, if anybody is to be told; raises RuntimeError where none can start."""
        if self._context.events.listeners or self._webhooks:
            self._thread = keep_going("ojs-groups", self._round)

    def stop(self, seconds: float = 2.0) -> None:
        """End the thread; what it sends may take so many seconds more."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _round(self) -> bool:
        if self._over.wait(PERIOD.total_seconds() * random.uniform(0.8, 1.2)):
            return False
        try:
            self.look()
        except StoreError as error:
            # Other lines of the log tell of an outage.
            logger.debug("groups are not told: %s", error)
        return True

    def look(self) -> None:
        """Tell of the groups of now, unless another worker does in this period; raises StoreError."""
        store, clock = self._context.store_for("webhooks"), self._context.clock
        webhooks = [one for one in self._webhooks if self._rests.get(one.name, 0) < time.monotonic()]
        if webhooks or self._context.events.listeners:
            once_a_period(store.reservations, "groups", PERIOD, clock, lambda: self._tell(store, webhooks))

    def _tell(self, store: Store, webhooks: Sequence[Webhook]) -> None:
        told = [
            (group, event_of(group, self._context.clock()))
            for group in self._groups.list(state=LIVE, limit=MOST, steps=1)
        ]
        # A slow receiver keeps no listener waiting.
        for group, event in told:
            if self._context.events.listeners and self._claim(store, "events", group):
                self._context.emit(event)
        for group, event in told:
            for webhook in webhooks:
                if group.state in webhook.states:
                    self._post(store, webhook, group, event)

    def _post(self, store: Store, webhook: Webhook, group: ErrorGroup, event: Event) -> None:
        """Send an event to a webhook, if none was told yet; after an error other processes try."""
        if self._rests.get(webhook.name, 0) > time.monotonic():
            return
        claim = self._claim(store, webhook.name, group)
        if claim is None:
            return
        tried = int(claim.body["tried"])
        try:
            webhook.send(event, self._context.clock())
        except Exception as error:  # noqa: BLE001 - such as a broken answer
            self._rests[webhook.name] = time.monotonic() + RESTS
            logger.warning(
                "webhook %s did not take %s of group %s (try %d of %d): %s",
                webhook.name, event.type, event.subject, tried, TRIES, _why(error),
            )  # fmt: skip
            is_told, until = tried >= TRIES, self._context.clock()
        else:
            is_told, until = True, self._context.clock()
        body = {**claim.body, "told": is_told, "until": format_time(until)}
        store.documents.write(next_of(claim, KIND, claim.id, claim.at, body))

    def _claim(self, store: Store, to: str, group: ErrorGroup) -> Document | None:
        """Return the claim to tell of a group; None if it was told, or another process does so now."""
        now, since = self._context.clock(), group.state_since or group.group.first_at
        name = f"{to}:{group.group.fingerprint}:{group.state}"
        known = store.documents.get(KIND, name)
        read = next(readable([known] if known else [], _told), None)
        at, tried = now, 0
        if known is not None and read is not None:
            is_told, until, tries = read
            was_this = known.at > now - AGAIN if group.state == "growing" else known.at >= since
            if was_this and (is_told or until > now):
                return None
            if was_this:
                at, tried = known.at, tries
        # What listeners are told is told at once.
        body = {"told": to == "events", "tried": tried + 1, "until": format_time(now + SENDS)}
        claim = next_of(known, KIND, name, at, body)
        return claim if store.documents.write(claim) else None


def event_of(group: ErrorGroup, at: datetime) -> Event:
    """Return the event of a group that is new, came back or grows."""
    return events.group(group.state, group.group.fingerprint, at, facts_of(group))


def facts_of(group: ErrorGroup) -> dict[str, Any]:
    """Return what an event tells of a group."""
    told, types = group.to_ojs(), group.group.types
    names = ("state", "state_since", "error_type", "message", "frame", "count", "retrying", "per_minute")
    return {"job_type": types[0] if types else "", **{name: told[name] for name in names}}


def _told(document: Document) -> tuple[bool, datetime, int]:
    body = document.body
    return bool(body["told"]), parse_time(body["until"]), int(body["tried"])


def _why(error: Exception) -> str:
    """Return why a request failed, without its URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"it answered {error.code}"
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    return f"{type(reason).__name__}"
