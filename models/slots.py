"""A model of slots: jobs of a limited dependency, which workers of one fleet begin, end, and hand on.

    python -m models.slots            every scene, and the broken twins: half a minute; --deep has more

A document of the store names the jobs that have a slot and those that wait for one. It is read, and written
only if nobody has written it meanwhile (engine/limits.py). Between two steps of one process all others may
take theirs. Time is left out: a slot that was given and not taken grows old whenever it is possible at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: The ages of an entry: a job that is given a slot trusts it while it is fresh; an old one counts as taken
#: for others, as long as it has not lapsed; after that it counts while its job's attempt is reserved.
FRESH, OLD, LAPSED = 0, 1, 2


class Entry(NamedTuple):
    """A slot that a job has: its number, its fence, the age of the entry."""

    job: int
    fence: int
    age: int = FRESH


class Slots(NamedTuple):
    """The document."""

    taken: tuple[Entry, ...] = ()
    waits: tuple[tuple[int, int], ...] = ()


class Process(NamedTuple):
    """What a process knows of the document, and whether it is still the latest one."""

    slots: Slots = Slots()
    is_latest: bool = False
    following: int = -1  # the job to which it gives a slot


class Job(NamedTuple):
    """A job: where it is, its fence, whether its attempt is reserved and neither settled nor expired."""

    pc: str = "queue"
    fence: int = 0
    reserved: bool = False
    process: Process = Process()


class State(NamedTuple):
    """All jobs, the document, the worker that looks for free slots, and the faults that may still happen."""

    jobs: tuple[Job, ...]
    slots: Slots = Slots()
    waker: tuple[str, Process] = ("idle", Process())
    kills: int = 0
    cancels: int = 0
    asks: int = 0  # a held job asks again, though nobody has given it a slot


class Rules(NamedTuple):
    """How many jobs and slots there are, and the faults."""

    jobs: int = 2
    most: int = 1
    kills: int = 1
    cancels: int = 0
    asks: int = 0
    broken: str = ""


Step = tuple[str, bool, State]
#: Where a worker has a job; a kill at these leaves its reservation as it is.
AT_WORK = ("reserved", "read", "looked", "running", "parking", "ended", "freeing", "freed")


def put(s: State, n: int, **changes: object) -> State:
    """Change a job."""
    jobs = list(s.jobs)
    jobs[n] = jobs[n]._replace(**changes)
    return s._replace(jobs=tuple(jobs))


def write(s: State, slots: Slots, mine: Process, rules: Rules) -> State | None:
    """Write the document; None if somebody else has written it since it was read."""
    if not mine.is_latest and rules.broken != "blind_write":
        return None
    stale = tuple(job._replace(process=job.process._replace(is_latest=False)) for job in s.jobs)
    pc, process = s.waker
    return s._replace(jobs=stale, slots=slots, waker=(pc, process._replace(is_latest=False)))


def live(s: State, entries: tuple[Entry, ...], rules: Rules) -> tuple[Entry, ...]:
    """Return the slots whose jobs are under way, or were just given one (`_live`)."""
    if rules.broken == "never_frees":
        return entries
    by_age = rules.broken == "by_age"
    return tuple(
        one
        for one in entries
        if one.age != LAPSED
        or (not by_age and s.jobs[one.job].reserved and s.jobs[one.job].fence == one.fence)
    )


def steps(s: State, rules: Rules) -> Iterator[Step]:
    """Yield every step from a state: a label, whether it is a fault, the state after it."""
    for n, job in enumerate(s.jobs):
        yield from of_job(s, n, job, rules)
        if job.pc in AT_WORK and s.kills:
            # Its message comes again when its attempt is judged; an ended one has been settled.
            goes = "dead" if job.reserved else "done"
            t = put(s, n, pc=goes, process=Process())._replace(kills=s.kills - 1)
            yield f"the worker of {n} is killed", True, t
        if job.pc == "held" and s.cancels:
            yield f"{n} is cancelled", True, put(s, n, pc="done")._replace(cancels=s.cancels - 1)
        if job.pc == "held" and s.asks:
            yield f"{n} asks again", True, put(s, n, pc="queue")._replace(asks=s.asks - 1)
    for entry in s.slots.taken:
        if entry.age != LAPSED:
            older = tuple(one._replace(age=one.age + 1) if one is entry else one for one in s.slots.taken)
            yield f"the slot of {entry.job} grows old", False, s._replace(slots=s.slots._replace(taken=older))
    if rules.broken != "no_wake":
        yield from of_waker(s, rules)


def of_job(s: State, n: int, job: Job, rules: Rules) -> Iterator[Step]:
    """Yield the next step of a job, or of the process that has it."""
    mine = job.process
    match job.pc:
        case "queue":
            yield f"{n} is reserved", False, put(s, n, pc="reserved", reserved=True)
        case "dead":  # a lost attempt is judged, and the job goes on by another message
            yield f"{n} is taken for lost", False, put(s, n, pc="queue", fence=job.fence + 1, reserved=False)
        case "reserved":
            yield (
                f"{n} reads the slots",
                False,
                put(s, n, pc="read", process=Process(s.slots, is_latest=True)),
            )
        case "read":
            own = [one for one in mine.slots.taken if (one.job, one.fence) == (n, job.fence)]
            if own and (own[0].age == FRESH or rules.broken == "trusts_old"):
                yield (
                    f"{n} has been given a slot, and runs",
                    False,
                    put(s, n, pc="running", process=Process()),
                )
                return
            others = tuple(one for one in mine.slots.taken if one not in own)
            if len(others) >= rules.most:
                others = live(s, others, rules)
            looked = mine._replace(slots=mine.slots._replace(taken=others))
            yield f"{n} looks which slots are taken", False, put(s, n, pc="looked", process=looked)
        case "looked":
            taken, waits = mine.slots
            if len(taken) < rules.most:
                slots, goes = Slots((*taken, Entry(n, job.fence)), waits), "running"
            else:
                left = tuple(one for one in waits if one[0] != n)
                slots, goes = Slots(taken, (*left, (n, job.fence + 1))), "parking"
            t = write(s, slots, mine, rules)
            if t is None:
                yield f"{n} could not write the slots", False, put(s, n, pc="reserved", process=Process())
            else:
                yield f"{n} writes the slots, and is {goes}", False, put(t, n, pc=goes, process=Process())
        case "parking":  # parked and settled in one step
            yield f"{n} waits", False, put(s, n, pc="held", fence=job.fence + 1, reserved=False)
        case "running":
            yield f"{n} ends", False, put(s, n, pc="ended", reserved=False)
        case "ended":
            yield (
                f"{n}'s worker reads",
                False,
                put(s, n, pc="freeing", process=Process(s.slots, is_latest=True)),
            )
        case "freeing":
            left = tuple(one for one in mine.slots.taken if (one.job, one.fence) != (n, job.fence))
            yield from give(s, n, mine, left, rules)
        case "freed":
            t = put(s, n, pc="done", process=Process())
            yield f"{n}'s worker sends the next job", False, sent(t, mine.following)


def give(s: State, n: int, mine: Process, left: tuple[Entry, ...], rules: Rules) -> Iterator[Step]:
    """Yield how a process gives a free slot to the next job (`_give`); the waker has no job of its own."""
    left, following, waits = live(s, left, rules), -1, mine.slots.waits
    if len(left) < rules.most:
        while waits and following < 0:
            (job, fence), waits = waits[0], waits[1:]
            if s.jobs[job].pc == "held" and s.jobs[job].fence == fence:
                following = job
        if following < 0:
            has = {(one.job, one.fence) for one in left}
            found = [j for j, one in enumerate(s.jobs) if one.pc == "held" and (j, one.fence) not in has]
            following = found[0] if found else -1
    if following >= 0:
        left = (*left, Entry(following, s.jobs[following].fence))
    elif n < 0:
        yield "nobody waits for a free slot", False, s._replace(waker=("idle", Process()))
        return
    t = write(s, Slots(left, waits), mine, rules)
    if n < 0:
        waker = ("idle", Process()) if t is None else ("gave", Process(following=following))
        yield "a worker looks for a free slot", False, (t or s)._replace(waker=waker)
    elif t is None:
        yield f"{n}'s worker could not write", False, put(s, n, pc="ended", process=Process())
    else:
        yield f"{n} gives its slot back", False, put(t, n, pc="freed", process=Process(following=following))


def of_waker(s: State, rules: Rules) -> Iterator[Step]:
    """Yield the next step of the worker that looks for free slots now and then (`wake`)."""
    pc, mine = s.waker
    if pc == "idle" and any(job.pc == "held" for job in s.jobs):
        yield "a worker reads the slots", False, s._replace(waker=("read", Process(s.slots, is_latest=True)))
    elif pc == "read":
        yield from give(s, -1, mine, mine.slots.taken, rules)
    elif pc == "gave":
        yield "a worker sends a job", False, sent(s._replace(waker=("idle", Process())), mine.following)


def sent(s: State, n: int) -> State:
    """Send a job that waits; it may have gone meanwhile."""
    return put(s, n, pc="queue") if n >= 0 and s.jobs[n].pc == "held" else s


def canonical(s: State) -> State:
    """Return the state with the fence of each job as 1: others are the same, the next one, or old."""
    fences = [job.fence for job in s.jobs]

    def near(job: int, fence: int) -> int:
        return 1 + min(max(fence - fences[job], -1), 1)

    def seen_from(slots: Slots) -> Slots:
        taken = tuple(one._replace(fence=near(one.job, one.fence)) for one in slots.taken)
        return Slots(taken, tuple((job, near(job, fence)) for job, fence in slots.waits))

    def known(process: Process) -> Process:
        return process._replace(slots=seen_from(process.slots))

    jobs = tuple(job._replace(fence=1, process=known(job.process)) for job in s.jobs)
    return s._replace(jobs=jobs, slots=seen_from(s.slots), waker=(s.waker[0], known(s.waker[1])))


def explore(rules: Rules) -> tuple[int, Mapping[str, list[str]]]:
    """Visit every state, breadth-first; return their number, and each violation with its shortest trace."""
    first = State((Job(fence=1),) * rules.jobs, kills=rules.kills, cancels=rules.cancels, asks=rules.asks)
    seen, states, ways, back = {first: 0}, [first], [(-1, "")], [list[int]()]
    wrong: dict[str, int] = {}
    for n, s in enumerate(states):
        if sum(job.pc == "running" for job in s.jobs) > rules.most:
            wrong.setdefault("S1 more jobs run than there are slots", n)
        for label, is_fault, after in steps(s, rules):
            t = canonical(after)
            if t not in seen:
                seen[t] = len(states)
                states.append(t)
                ways.append((n, label))
                back.append([])
            if not is_fault:
                back[seen[t]].append(n)
    ends = [n for n, s in enumerate(states) if all(job.pc == "done" for job in s.jobs)]
    can_end = set(ends)
    while ends:
        for n in back[ends.pop()]:
            if n not in can_end:
                can_end.add(n)
                ends.append(n)
    if len(can_end) < len(states):
        wrong.setdefault("S2 stuck: a slot is lost", min(set(range(len(states))) - can_end))
    return len(states), {what: _trace(ways, n) for what, n in wrong.items()}


def _trace(ways: list[tuple[int, str]], n: int) -> list[str]:
    labels = []
    while n > 0:
        n, label = ways[n]
        labels.append(label)
    return labels[::-1]


SCENES = {
    "two jobs, one slot, two kills": Rules(kills=2),
    "two jobs, one slot, one that is cancelled and asks again": Rules(cancels=1, asks=1),
    "two jobs, two slots, a kill": Rules(most=2),
}
#: With three jobs, some minutes.
DEEP = {"three jobs, one slot": Rules(3, kills=0)}
#: What each twin breaks; it must be found.
TWINS = {
    "blind_write": ("the slots are written whoever has written them meanwhile", Rules(kills=0)),
    "trusts_old": ("a job takes a slot for its own that it was given long ago", Rules()),
    "by_age": ("a slot is free after a while, whether or not its job runs", Rules()),
    "never_frees": ("the slot of a killed worker stays taken", Rules()),
    "no_wake": ("nobody looks for free slots but those who end a run", Rules()),
}


def found_in_twin(name: str) -> Mapping[str, list[str]]:
    """Return what is wrong in a broken twin."""
    return explore(TWINS[name][1]._replace(broken=name))[1]


def main(words: list[str]) -> int:
    """Print the tables; return 1 if one of them is not as it should be."""
    failed = []
    for name, rules in {**SCENES, **(DEEP if "--deep" in words else {})}.items():
        count, wrong = explore(rules)
        failed += [name] * bool(wrong)
        print(f"{name:60} {count:9,} states  {'NOT AS EXPECTED' if wrong else 'ok'}", flush=True)
        for what, way in wrong.items():
            print(f"      {what}", *way, sep="\n            ")
    for name, (what, _) in TWINS.items():
        found = found_in_twin(name)
        failed += [name] * (not found)
        print(f"{what:72} {', '.join(found) or 'NOT FOUND'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
