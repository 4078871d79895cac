"""The rows of the tables, by the groups that are measured together."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.runs import Load
from benchmarks.tables import DISTANCE, IDLE, TRACED, WORK, Table

REDIS_AND_SQL = ("redis", "sqlite", "postgres")


@dataclass(frozen=True)
class Group:
    """A load, and the sides that end it in turn; each but the first is a row."""

    name: str
    load: Load
    stores: tuple[str, ...] = ()
    table: Table = WORK

    @property
    def sides(self) -> tuple[str, ...]:
        """The sides, the one that others are compared with first."""
        return ("redis", "traced") if self.table is TRACED else ("native", "bridge", *self.stores)


def _dramatiq(threads: int, jobs: int, **more: bool | int) -> Load:
    return Load("dramatiq", threads, jobs, **more)  # type: ignore[arg-type]


def _celery(children: int, jobs: int, **more: bool | int) -> Load:
    return Load("celery", children, jobs, **more)  # type: ignore[arg-type]


GROUPS = {
    "dramatiq-memory": Group("Dramatiq in memory", _dramatiq(8, 32_000, in_memory=True)),
    "dramatiq": Group("Dramatiq", _dramatiq(8, 8_000), REDIS_AND_SQL),
    "dramatiq-1": Group("Dramatiq, 1 thread", _dramatiq(1, 2_000), ("redis",)),
    "dramatiq-2": Group("Dramatiq, 2 threads", _dramatiq(2, 4_000), ("redis",)),
    "dramatiq-32": Group("Dramatiq, 32 threads", _dramatiq(32, 8_000), ("redis",)),
    "dramatiq-queues": Group("Dramatiq, 4 queues", _dramatiq(8, 8_000, queues=4)),
    "celery-1": Group("Celery, 1 child", _celery(1, 4_000), REDIS_AND_SQL),
    "celery": Group("Celery, 2 children", _celery(2, 4_000), REDIS_AND_SQL),
    "dramatiq-durable": Group(
        "Dramatiq, each change on disk", _dramatiq(8, 2_000, is_durable=True), ("redis", "postgres")
    ),
    "celery-durable": Group(
        "Celery, 2 children, each change on disk", _celery(2, 2_000, is_durable=True), ("redis", "postgres")
    ),
    "dramatiq-rabbitmq": Group("Dramatiq on RabbitMQ", _dramatiq(8, 4_000, on_rabbitmq=True), ("postgres",)),
    "celery-rabbitmq": Group(
        "Celery on RabbitMQ, 2 children", _celery(2, 4_000, on_rabbitmq=True), ("postgres",)
    ),
    "dramatiq-memory-fails": Group(
        "Dramatiq in memory, 4 runs fail", _dramatiq(8, 1_200, in_memory=True, fails=True)
    ),
    "dramatiq-fails": Group("Dramatiq, 4 runs fail", _dramatiq(8, 800, fails=True)),
    "celery-fails": Group("Celery, 4 runs fail", _celery(2, 400, fails=True)),
    "dramatiq-idle": Group("Dramatiq", _dramatiq(8, 0, is_idle=True), ("redis", "postgres"), IDLE),
    "celery-idle": Group("Celery, 2 children", _celery(2, 0, is_idle=True), ("redis", "postgres"), IDLE),
    "dramatiq-far": Group("Dramatiq", _dramatiq(8, 4_000, is_far=True), ("redis", "postgres"), DISTANCE),
    "celery-far": Group(
        "Celery, 2 children", _celery(2, 1_000, is_far=True), ("redis", "postgres"), DISTANCE
    ),
    "celery-1-far": Group("Celery, 1 child", _celery(1, 600, is_far=True), ("redis", "postgres"), DISTANCE),
    "dramatiq-traced": Group("Dramatiq", _dramatiq(8, 8_000), table=TRACED),
    "celery-traced": Group("Celery, 2 children", _celery(2, 4_000), table=TRACED),
}
