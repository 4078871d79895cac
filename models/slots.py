"""A model of slots: jobs of a limited dependency, which workers of one fleet begin, end, and hand on.

    python -m models.slots            every scene, and the broken twins: half a minute; --deep: 15 more

A document of the store names the jobs that have slots and those that wait for some. It is read, and written
only if nobody has written it meanwhile (engine/limits.py). Between two steps of one process all others may
take theirs. Time is left out: a slot that was given and not taken grows old whenever it is possible at all.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
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
    is_late: bool = False  # its job was given slots long ago
    following: tuple[int, ...] = ()  # the jobs to which it gives slots


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
    overtaken: bool = False  # a job has taken a slot before one that waits


class Rules(NamedTuple):
    """How many jobs and slots there are, how many each job needs (one), and the faults."""

    jobs: int = 2
    most: int = 1
    weights: tuple[int, ...] = ()
    kills: int = 1
    cancels: int = 0
    asks: int = 0
    broken: str = ""


Step = tuple[str, bool, State]
#: Where a worker has a job; a kill at these leaves its reservation as it is.
AT_WORK = (
    *("reserved", "read", "looked", "sharing", "gives", "gave", "running", "parking", "ended", "freeing"),
    "freed",
)


def used(entries: Iterable[Entry], rules: Rules) -> int:
    """Return how many slots are taken."""
    if rules.broken == "counts_one":
        return len([*entries])
    return sum(weight(entry.job, rules) for entry in entries)


def weight(n: int, rules: Rules) -> int:
    """Return how many slots a job needs."""
    return rules.weights[n] if rules.weights else 1


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
            if used(others, rules) + weight(n, rules) > rules.most:
                others = live(s, others, rules)
            looked = mine._replace(slots=mine.slots._replace(taken=others), is_late=bool(own))
            yield f"{n} looks which slots are taken", False, put(s, n, pc="looked", process=looked)
        case "looked":
            yield asked(s, n, job, rules)
        case "sharing":  # others wait, and there is a free slot
            t = put(s, n, pc="gives", process=Process(s.slots, is_latest=True))
            yield f"{n}'s worker reads for others", False, t
        case "gives":
            yield from give(s, n, mine, mine.slots.taken, rules)
        case "gave":
            yield f"{n}'s worker sends others", False, sent(put(s, n, pc="parking", process=Process()), mine)
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
            yield f"{n}'s worker sends the next jobs", False, sent(t, mine)


def asked(s: State, n: int, job: Job, rules: Rules) -> Step:
    """Return how a job takes slots, or waits for some (`_has_slots`)."""
    mine, (taken, waits) = job.process, job.process.slots
    is_next = mine.is_late or not waits or waits[0][0] == n or rules.broken == "overtakes"
    has_them = is_next and used(taken, rules) + weight(n, rules) <= rules.most
    place, place_in = (
        (n, job.fence + 1),
        [one[0] for one in waits].index(n) if n in dict(waits) else len(waits),
    )
    if has_them:
        slots, goes = (
            Slots((*taken, Entry(n, job.fence)), (*waits[:place_in], *waits[place_in + 1 :])),
            "running",
        )
    else:
        slots = Slots(taken, (*waits[:place_in], place, *waits[place_in + 1 :]))
        goes = "parking" if is_next or used(taken, rules) >= rules.most else "sharing"
    t = write(s, slots, mine, rules)
    if t is None:
        return f"{n} could not write the slots", False, put(s, n, pc="reserved", process=Process())
    overtakes = has_them and not mine.is_late and is_held(s, waits[:place_in])
    t = put(t, n, pc=goes, process=Process())._replace(overtaken=overtakes)
    return f"{n} writes the slots, and is {goes}", False, t


def give(s: State, n: int, mine: Process, left: tuple[Entry, ...], rules: Rules) -> Iterator[Step]:
    """Yield how a process gives free slots to the next jobs (`_give`); the waker has no job of its own."""
    left, given, waits = live(s, left, rules), tuple[int, ...](), mine.slots.waits
    while used(left, rules) < rules.most:
        job, waits = following(s, left, waits)
        if job < 0:
            break
        if used(left, rules) + weight(job, rules) > rules.most and rules.broken != "gives_part":
            waits = ((job, s.jobs[job].fence), *waits)
            break
        left, given = (*left, Entry(job, s.jobs[job].fence)), (*given, job)
    has_ended = n >= 0 and s.jobs[n].pc == "freeing"
    t: State | None = s
    if given or has_ended or waits != mine.slots.waits:
        t = write(s, Slots(left, waits), mine, rules)
    process = Process(following=given)
    if n < 0:
        waker = ("gave", process) if t and given else ("idle", Process())
        yield "a worker looks for free slots", False, (t or s)._replace(waker=waker)
    elif t is None:
        back = "ended" if has_ended else "sharing"
        yield f"{n}'s worker could not write", False, put(s, n, pc=back, process=Process())
    else:
        pc = "freed" if has_ended else "gave"
        yield f"{n}'s worker gives slots to {given}", False, put(t, n, pc=pc, process=process)


def following(
    s: State, left: tuple[Entry, ...], waits: tuple[tuple[int, int], ...]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the job that has waited longest, or -1, and those that wait on (`_next`)."""
    parking = tuple[tuple[int, int], ...]()
    while waits:
        (job, fence), waits = waits[0], waits[1:]
        if is_held(s, ((job, fence),)):
            return job, (*parking, *waits)
        if s.jobs[job].pc in ("sharing", "gives", "gave", "parking"):
            parking = (*parking, (job, fence))
    has = {(one.job, one.fence) for one in left}
    found = [j for j, one in enumerate(s.jobs) if one.pc == "held" and (j, one.fence) not in has]
    return (found[0] if found else -1), parking


def is_held(s: State, waits: Iterable[tuple[int, int]]) -> bool:
    """Return whether one of those that wait is in the store."""
    return any(s.jobs[job].pc == "held" and s.jobs[job].fence == fence for job, fence in waits)


def of_waker(s: State, rules: Rules) -> Iterator[Step]:
    """Yield the next step of the worker that looks for free slots now and then (`wake`)."""
    pc, mine = s.waker
    if pc == "idle" and any(job.pc == "held" for job in s.jobs):
        yield "a worker reads the slots", False, s._replace(waker=("read", Process(s.slots, is_latest=True)))
    elif pc == "read":
        yield from give(s, -1, mine, mine.slots.taken, rules)
    elif pc == "gave":
        yield "a worker sends jobs", False, sent(s._replace(waker=("idle", Process())), mine)


def sent(s: State, process: Process) -> State:
    """Send jobs that wait; they may have gone meanwhile."""
    for n in process.following:
        s = put(s, n, pc="queue") if s.jobs[n].pc == "held" else s
    return s


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
        if sum(weight(n, rules) for n, job in enumerate(s.jobs) if job.pc == "running") > rules.most:
            wrong.setdefault("S1 more jobs run than there are slots", n)
        if s.overtaken:
            wrong.setdefault("S3 a job goes before one that waits", n)
        if wrong and rules.broken:
            break
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
    if len(can_end) < len(states) and not wrong:
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
    "a job that needs both slots and one that needs one, a kill": Rules(most=2, weights=(2, 1)),
}
#: With three jobs; 0.8 and 1.6 million states.
DEEP = {
    "three jobs, one slot": Rules(3, kills=0),
    "three jobs, two slots, of which one needs both": Rules(3, 2, (2, 1, 1), kills=0),
}
#: What each twin breaks; it must be found.
TWINS = {
    "blind_write": ("the slots are written whoever has written them meanwhile", Rules(kills=0)),
    "trusts_old": ("a job takes a slot for its own that it was given long ago", Rules()),
    "by_age": ("a slot is free after a while, whether or not its job runs", Rules()),
    "never_frees": ("the slot of a killed worker stays taken", Rules()),
    "counts_one": ("a job that needs two slots counts for one", Rules(most=2, weights=(2, 1))),
    "gives_part": ("a job is given fewer slots than it needs", Rules(most=2, weights=(2, 1))),
    "overtakes": ("a job takes a free slot although others wait", Rules(most=2, weights=(2, 1))),
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
