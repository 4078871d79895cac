"""The bridge: a user gives it to an app or a broker, and asks it about jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial

from .config.settings import Settings, settings_of
from .engine.context import Context
from .engine.engine import Engine
from .engine.events import Dispatcher, Listener
from .engine.holds import RELEASE_SECONDS, Releaser
from .engine.redaction import Redaction, Redactor
from .engine.scheduler import RELEASE, Chore, Scheduler
from .engine.storage_retry import StorageRetry
from .engine.turns import Turns
from .operations.audit import Audit, Marks
from .operations.broker_letters import BrokerLetters
from .operations.bulk import Operations
from .operations.dead_letters import DeadLetters
from .operations.health import BEAT, Beat, Probe
from .operations.holds import Holds
from .operations.letters import Jobs
from .operations.limits import Limits
from .operations.now import Moment, Now
from .operations.rates import RateHistory, history, in_broker
from .operations.replaying import PERIOD as RULES_PERIOD
from .operations.replaying import ReplayRule
from .operations.report import Report, report
from .operations.retention import PERIOD as PRUNE_PERIOD
from .operations.retention import Retention
from .operations.waiting import Waiting
from .operations.webhooks import Teller, Webhook
from .rules.dependencies import Dependencies, Dependency
from .rules.failures import Errors
from .rules.policy import PartialPolicy
from .store import KINDS, STATES, Filter, Store


class Bridge:
    """Retry semantics of the Open Job Spec for the app or the broker that is given this bridge.

    Every argument is optional. The bridge looks for a missing argument in Django's settings, in OJS_BRIDGE_*
    variables and in a TOML table (docs/reference/settings.md). Raises InvalidRetryPolicy and
    ConfigurationError.

    Args:
        store: the URL of a store, such as `sqlite:///ojs.db`, or a store. Dead letters, parked jobs and
            reservations are kept there. Without it dead letters go to a dead queue on the broker.
        retry: the default policy of all jobs; a task's own policy, and a job's, are merged over it.
        errors: error types by exception class, as `standard_errors()` has them; an error type may come with a
            response code.
        listeners: callables, each of which is called with every Event, on a thread of its own.
        webhooks: URLs to which workers post the groups of errors that are new, came back or grow, each a
            `Webhook` or a URL alone.
        dependencies: what jobs need that may fail, each a `Dependency`; while the breaker of one is open, its
            jobs are held.
        namespace: the name that this bridge's records have in a store that several fleets share.
        history: how many errors a job's message carries; the store keeps the older ones.
        header_budget: how many bytes a job's retry state may take of its message.
        reservation: for how long an attempt is reserved; a heartbeat extends the reservation.
        park_after: a retry that is due later than that waits in the store, not in the broker.
        park_delays: whether a job that its user delays by more than that waits there, too.
        release_rate: how fast jobs that wait in the store leave it when they are due, all workers together,
            such as `"500/s"`, `"100/m"` or `"10/h"`; without it there is no limit.
        outbox: whether a job that is sent within a transaction of Django's on the store's database is a part
            of it.
        fail_open: whether jobs run without a reservation while the store cannot be reached; else they wait.
        settle_behind: whether a success is settled within 20 ms, and no job waits for it; else it is settled
            before its message is acknowledged. A store in the memory of this process settles at once.
        out_of_reach: for how long a worker whose connection has ended may be out of reach of the store before
            its attempts are lost; four seconds at the least. Meanwhile a killed worker's jobs wait.
        retention: how long dead letters are kept, and how many: without it for 180 days, and 10,000.
        redact: names of arguments that are not shown, or a callable. The callable gets an argument's name and
            value, and returns the value to show.
        replay_rules: which dead letters are replayed by themselves.
        storage_retry: how often an operation on the store or the broker is tried when it settles a job: five
            times, with pauses of 0.1 s that double.
        polling_retry: how often it is tried when the bridge looks for due retries: three times, with pauses
            of 0.5 s that double.
    """

    # A callable of C, because each step of a job asks for the time.
    _now = staticmethod(partial(datetime.now, timezone.utc))
    _beat: Beat

    def __init__(
        self,
        store: str | Store | None = None,
        retry: PartialPolicy | None = None,
        errors: Errors | None = None,
        listeners: Sequence[Listener] | None = None,
        *,
        webhooks: Sequence[Webhook | str] | None = None,
        dependencies: Sequence[Dependency] | None = None,
        namespace: str | None = None,
        history: int | None = None,
        header_budget: int | None = None,
        reservation: str | timedelta | None = None,
        park_after: str | timedelta | None = None,
        park_delays: bool | None = None,
        release_rate: str | float | None = None,
        outbox: bool | None = None,
        fail_open: bool | None = None,
        settle_behind: bool | None = None,
        out_of_reach: str | timedelta | None = None,
        retention: Retention | None = None,
        redact: Redaction | None = None,
        replay_rules: Sequence[ReplayRule] | None = None,
        storage_retry: StorageRetry | None = None,
        polling_retry: StorageRetry | None = None,
    ) -> None:
        settings = settings_of(
            store=store,
            namespace=namespace,
            retry=retry,
            errors=errors,
            listeners=listeners,
            webhooks=webhooks,
            dependencies=dependencies,
            history=history,
            header_budget=header_budget,
            reservation=reservation,
            park_after=park_after,
            park_delays=park_delays,
            release_rate=release_rate,
            outbox=outbox,
            fail_open=fail_open,
            settle_behind=settle_behind,
            out_of_reach=out_of_reach,
            retention=retention,
            redact=redact,
            replay_rules=replay_rules,
            storage_retry=storage_retry,
            polling_retry=polling_retry,
        )
        context = Context(
            settings.store,
            self._now,
            settings.history,
            settings.header_budget,
            settings.storage_retry,
            Dispatcher(settings.listeners),
            Redactor(settings.redact),
        )
        self._assemble(settings, context)

    def _assemble(
        self,
        settings: Settings,
        context: Context,
        engine: Callable[..., Engine] = Engine,
        scheduler: type[Scheduler] = Scheduler,
    ) -> None:
        """Make the parts of the bridge; a test makes them anew, with an engine and a scheduler of its own."""
        #: The settings of this bridge.
        self.settings = settings
        self.store = settings.store
        #: For the adapters.
        self.engine = engine(
            context,
            retry=settings.retry,
            errors=settings.errors,
            dependencies=Dependencies(settings.dependencies),
            reservation=settings.reservation,
            park_after=settings.park_after,
            fail_open=settings.fail_open,
            settle_behind=settings.settle_behind,
            out_of_reach=settings.out_of_reach,
        )
        self._scheduler_type = scheduler
        self._scheduler: Scheduler | None = None
        #: The workers of this process that have started and not stopped.
        self._workers = 0
        self.dead_letters = DeadLetters(context, settings.retention, settings.replay_rules)
        self.groups = self.dead_letters.groups
        self.broker_letters = BrokerLetters(context)
        #: What waits in the store, and two views of it: parked retries, and jobs that their users delay. Held
        #: jobs are in the first one alone.
        self.waiting = waiting = Waiting(context)
        self.retries, self.scheduled = Waiting(context, "retry"), Waiting(context, "scheduled")
        self.holds = Holds(context, self.engine.holds, self.engine.dependencies)
        self.pause, self.resume = self.holds.pause, self.holds.resume
        self.limits = Limits(context, self.engine.dependencies, self.holds)
        self.limit = self.limits.set
        letters = self.dead_letters
        self.jobs = Jobs(letters.find, waiting.find, letters.id_of, waiting.id_of)
        self.audit, self.marks, self.health = Audit(context), Marks(context), Probe(context)
        self.operations = Operations(context, self.dead_letters, waiting, self.audit)
        self._moments = Now(
            *(context, self.health, self.holds, self.operations, self.dead_letters.groups),
            self.engine.dependencies,
            fail_open=settings.fail_open,
        )

    def now(self) -> Moment:
        """Return what is known of the fleet now, and the verdict whether it is bad.

        The store and the brokers are asked once in five seconds at most, and have three seconds to answer.
        What a store that is away has told before, stays, with its time. Raises ConfigurationError without a
        store.
        """
        return self._moments.moment()

    def report(self, *, since: datetime | None = None, until: datetime | None = None) -> Report:
        """Return what happened: of the last day, or since a time of the last 14 days.

        It has what died of which error, how many jobs failed, recovered and were replayed, and who did what.
        `to_markdown()` writes it down. Raises ValueError, ConfigurationError without a store, and StoreError.
        """
        return report(self.engine.context, self.dead_letters.groups, since, until)

    def counts(self, *, queue: str | None = None) -> Mapping[str, int]:
        """Return how many jobs, of all queues or of one, are in each state that the store knows of.

        `retryable` are the retries that are not due: those that are parked, and those in the broker, of which
        workers tell every five seconds. `scheduled` are the jobs that wait in the store because their users
        delay them, `pending` those that are held, and `discarded` the dead letters. Only the broker knows the
        other jobs that wait or run, and a job that succeeded is not kept. Raises ConfigurationError without a
        store, and StoreError.
        """
        store = self.engine.context.store_for("counts by state")
        waiting: dict[str, int] = {
            STATES[kind]: store.parked.count(Filter(queue, kind=kind)) for kind in KINDS
        }
        waiting["retryable"] += in_broker(store.documents, self._now(), Filter(queue)).count
        return {**waiting, "discarded": store.letters.count(Filter(queue))}

    def rates(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        type: str | None = None,  # noqa: A002 - the spec's word
        queue: str | None = None,
    ) -> RateHistory:
        """Return how many runs came to which outcome: of the last day, or since a time of the last 14 days.

        Up to three hours of the last day are counted by the minute, anything else by the hour. `type` is a
        type, or a pattern such as `billing.*`. Workers write their counts every five seconds. Raises
        ValueError, ConfigurationError without a store, and StoreError.
        """
        return history(self.engine.context, Filter(queue, type, since=since, until=until))

    def start(self, framework: str = "", queues: Callable[[], Iterable[str]] = tuple) -> None:
        """Begin to publish parked jobs when they are due; workers call it, and `stop` as often.

        The health of the fleet names their framework, and the queues that they take at each moment.
        """
        self._workers += 1
        if self._workers == 1:
            self.engine.instruments.started()
        if self.store and self._scheduler is None:
            context, rate = self.engine.context, self.settings.release_rate
            self._releaser = Releaser(self.store, context.clock, self.engine.dependencies)
            self._beat = Beat(context, framework, queues)
            self._scheduler = self._scheduler_type(
                self.store.parked,
                self.store.reservations,
                context.publishers,
                context.clock,
                self.engine.give_up,
                self._chores(self._beat),
                self.settings.polling_retry,
                self.engine.outage,
                Turns(self.store.documents, RELEASE, rate) if rate else None,
            )
            self._scheduler.start()
            self._teller = Teller(context, self.groups, self.settings.webhooks)
            self._teller.start()

    def _chores(self, beat: Beat) -> tuple[Chore, ...]:
        seconds = PRUNE_PERIOD.total_seconds()
        prune = Chore("pruning", seconds, self.dead_letters.prune_once_a_period)
        replay = Chore("replay rules", RULES_PERIOD.total_seconds(), self.dead_letters.apply_replay_rules)
        lives = Chore("telling that this worker lives", BEAT.total_seconds(), beat.tell)
        release = Chore("releasing held jobs", RELEASE_SECONDS, self._releaser.release)
        chores = [prune, replay, lives, release]
        if limits := self.engine.limits:
            chores.append(Chore("giving out free slots", RELEASE_SECONDS, limits.wake))
            chores.append(Chore("forgetting old limits", seconds, limits.forget))
        if budgets := self.engine.budgets:
            chores.append(Chore("letting held retries go on", RELEASE_SECONDS, budgets.wake))
        return tuple(chores)

    def stop(self) -> None:
        """End the scheduler with the last worker, and let the listeners hear the last events."""
        self._workers = max(0, self._workers - 1)
        if self._workers:
            self.flush()
            return
        if self._scheduler:
            self._teller.stop()
            self._scheduler.stop()
            self._scheduler = None
            self._beat.end()
        self.engine.instruments.stopped()
        self.engine.close()
        self.flush()

    def flush(self, seconds: float = 2.0) -> bool:
        """Write the rates, and wait until the listeners have heard every event; return whether both is done.

        This waits for `seconds` at most.
        """
        return self.engine.settling.flush(seconds)
