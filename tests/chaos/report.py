"""The result of a trial: counts from the ledger, and from the last state of broker and store."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.fates import READING, SLOW, delay_before, fate_of
from tests.chaos.ledger import Line, Reader
from tests.chaos.settings import SLOTS
from tests.chaos.trial import Outcome

HEAD = (
    *("fleet", "jobs", "ended once", "lost", "never ended", "ended twice", "over `max_attempts`"),
    *("most starts over", "before their time", "effect repeated", "workers started", "seconds"),
    *("killed runs", "until they began again, s: p50", "longest", "longest with all servers up"),
)


@dataclass
class Verdict:
    """Counts of jobs, by their ends."""

    name: str
    jobs: int
    starts: int
    seconds: float
    lost: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    over: dict[str, int] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    crowded: list[str] = field(default_factory=list)
    #: Seconds from the kill of a run until its job began again, without the policy's wait, and whether all
    #: servers were there meanwhile.
    returns: list[tuple[float, bool]] = field(default_factory=list)

    @property
    def faults(self) -> dict[str, Iterable[str]]:
        """Return the jobs for which the bridge broke a promise, by promise."""
        found: dict[str, Iterable[str]] = {
            name: getattr(self, name)
            for name in ("lost", "stuck", "twice", "wrong", "over", "early", "held", "crowded")
        }
        return {name: jobs for name, jobs in found.items() if jobs}

    def cells(self) -> list[str]:
        """Return the row of the table."""
        unended = len(set(self.lost) | set(self.stuck) | set(self.twice) | set(self.wrong))
        numbers = (self.jobs, self.jobs - unended, len(self.lost), len(self.stuck), len(self.twice))
        most = max(self.over.values(), default=0)
        rest = (len(self.over), most, len(self.early), len(self.repeated), self.starts, round(self.seconds))
        seconds = sorted(second for second, _ in self.returns)
        told = seconds[len(seconds) // 2 :][:1] + seconds[-1:]
        told.append(max((second for second, all_up in self.returns if all_up), default=0.0))
        counts = (*numbers, *rest, len(seconds))
        return [self.name, *(f"{number:,}" for number in counts), *(f"{second:.1f}" for second in told)]


def judge(
    name: str, jobs: Sequence[str], outcome: Outcome, *, bridged: bool, limited: bool = False
) -> Verdict:
    """Count the jobs by their ends."""
    verdict = Verdict(name, len(jobs), outcome.starts, outcome.seconds)
    verdict.held = sorted(outcome.held)
    if limited:
        verdict.crowded = _crowded(outcome, jobs)
    for job in jobs:
        _judge_end(verdict, job, outcome, bridged=bridged)
        starts = outcome.ledger.lines(job, "start")
        over = len(starts) - fate_of(job).max_attempts
        if over > 0:
            verdict.over[job] = over
        if any(_is_early(outcome.ledger, job, start) for start in starts):
            verdict.early.append(job)
        verdict.returns += _returns(outcome, job)
    return verdict


def _crowded(outcome: Outcome, jobs: Sequence[str]) -> list[str]:
    """Return the slow jobs that ran while all slots were taken.

    A run ends when it is done, or when its process is killed. A frozen worker's runs are lost meanwhile.
    """
    runs: list[tuple[float, float, str]] = []
    for job in (job for job in jobs if fate_of(job).name == "slow"):
        for start in outcome.ledger.lines(job, "start"):
            ends = [line.at for line in outcome.ledger.lines(job, "done") if line.pid == start.pid]
            kills = [at for at, processes in outcome.kills if start.pid in processes]
            end = min((at for at in (*ends, *kills) if at >= start.at), default=start.at)
            # A run that takes much longer was frozen.
            runs.append((start.at, min(end, start.at + SLOW), job))
    return [job for at, _, job in runs if sum(begin <= at < end for begin, end, _ in runs) > SLOTS]


def story(faults: Mapping[str, Iterable[str]], outcome: Outcome, log: str) -> str:
    """Return the story of the jobs that came to harm: their lines in the ledger, then the log's."""
    lines = [f"{fault}: {', '.join(jobs)}" for fault, jobs in faults.items()]
    for job in sorted({job for jobs in faults.values() for job in jobs}):
        lines += [f"--- {job}", *(f"{line}" for line in sorted(outcome.ledger.jobs[job], key=_when))]
        lines += [line for line in log.splitlines() if re.search(rf"{job}(?!\d)", line)]
    return "\n".join(lines)


def _when(line: Line) -> float:
    return line.at


def _judge_end(verdict: Verdict, job: str, outcome: Outcome, *, bridged: bool) -> None:
    ledger, fate = outcome.ledger, fate_of(job)
    done = ledger.lines(job, "done")
    exhausted = [line for line in ledger.lines(job, "failed") if line.attempt >= fate.max_attempts]
    told = ledger.lines(job, "job.completed", "job.discarded")
    if len(done) > 1:
        verdict.repeated.append(job)
    ends = len(told) if bridged else len(done) + len(exhausted)
    if job in outcome.alive:
        verdict.stuck.append(job)
    elif not (done or told or exhausted or job in outcome.dead):
        verdict.lost.append(job)
    elif ends > 1:
        verdict.twice.append(job)
    elif bridged and not _as_its_fate_says(job, outcome):
        verdict.wrong.append(job)


def _as_its_fate_says(job: str, outcome: Outcome) -> bool:
    """Return whether a job ended as it was meant to, or dead after as many attempts as it may have."""
    fate, ledger = fate_of(job), outcome.ledger
    # The bank's jobs have too few attempts for its outage: its breaker saves them.
    if job in outcome.dead and fate.name != "bank":
        # A worker may be killed when it has reserved an attempt, and before its task has begun.
        attempts = [line.attempt for line in ledger.lines(job, "start", "job.discarded")]
        return max(*attempts, outcome.letters.get(job, 0), 0) == fate.max_attempts
    return not fate.dies and bool(ledger.lines(job, "done"))


def _is_early(ledger: Reader, job: str, start: Line) -> bool:
    """Return whether an attempt began too early after the last sign of the attempt before it."""
    before = [
        line
        for line in ledger.lines(job, "start", "failed", "dying")
        if line.attempt == start.attempt - 1 and line.at < start.at
    ]
    return bool(before) and start.at - before[-1].at < delay_before(start.attempt) - READING


def _returns(outcome: Outcome, job: str) -> Iterable[tuple[float, bool]]:
    """Yield, for each kill that hit a run of the job, the seconds until it began again, if it did."""
    starts = outcome.ledger.lines(job, "start")
    ends = {(line.pid, line.attempt) for line in outcome.ledger.lines(job, "done", "failed", "dying")}
    for killed, processes in outcome.kills:
        last = next((line for line in reversed(starts) if line.at < killed), None)
        again = next((line for line in starts if line.at > killed), None)
        if last and again and last.pid in processes and (last.pid, last.attempt) not in ends:
            wait = delay_before(again.attempt) if again.attempt > last.attempt else 0.0
            all_up = all(end < killed or again.at < begin for begin, end in outcome.outages)
            yield again.at - killed - wait, all_up


def table(verdicts: Iterable[Verdict]) -> Iterable[str]:
    """Return the lines of a Markdown table."""
    yield f"| {' | '.join(HEAD)} |"
    yield f"|---|{'---:|' * (len(HEAD) - 1)}"
    for verdict in verdicts:
        yield f"| {' | '.join(verdict.cells())} |"
