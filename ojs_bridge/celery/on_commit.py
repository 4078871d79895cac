"""What a task of Django's does under the bridge: jobs that are sent once the transaction is committed."""

from __future__ import annotations

from typing import Any

from celery import Task

from .attach import RETRY_OPTION, check_signatures, header_for


class SentOnCommit:
    """Refuses an invalid policy where the job is sent; after the commit nobody could answer it any more."""

    def apply_async_on_commit(self: Any, *args: Any, **options: Any) -> None:
        """Send the job after the commit, as Celery's own does; raises InvalidRetryPolicy at once."""
        if options.get(RETRY_OPTION) is not None:
            header_for(self.app, self.name, options[RETRY_OPTION])
        for later in ("link", "link_error"):
            if options.get(later):
                check_signatures(self.app, options[later])
        super().apply_async_on_commit(*args, **options)  # type: ignore[misc]


def sent_on_commit(native: type[Task]) -> tuple[type, ...]:
    """Return what a class needs beside the bridge's own: something for Django's task class alone."""
    return (SentOnCommit,) if hasattr(native, "apply_async_on_commit") else ()
