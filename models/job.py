"""A model checker for the life of one job: breadth-first over all states, in plain Python.

    python -m models.job              every scene of README.md, and the broken twins: under two minutes
    python -m models.job scenes       the scenes alone; or `twins`
    python -m models.job -v scenes    with the shortest trace of each violation
    python -m models.job --deep       with more faults: some minutes

The store does one operation at a time. A worker does one step at a time, and may crash, be cut off from the
store or stand still (which is the same for the others: nobody extends its reservation) between any two.
Time is left out: what time decides (a suspicion that has lasted, a reservation that ran out, a retry that is
due) may happen whenever it is possible at all. README.md says what is modelled, and names the code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: The holder of a reservation whose process has died, and of one that an operator has settled.
DEAD, OPERATOR = 9, 8
#: The same of a process that had said in the store that it was told to stop.
STOPPED = 7
#: How long a worker is cut off: its reservation stands still, or it runs out meanwhile.
SHORT, LONG = 1, 2


class Rules(NamedTuple):
    """What is checked: the faults that may happen, and what is broken on purpose."""

    attempts: int = 2
    delay: str = ""  # its user has delayed it: "stored" by its producer, "sent" by the broker, or "both"
    behind: bool = False
    gap: bool = (
        False  # a worker may also be cut off between asking whether its success counts and settling it
    )
    crashes: int = 1
    cuts: int = 0  # a worker is cut off for longer than its reservation
    blinks: int = 0  # a worker is cut off for longer than a suspicion, and not for as long as its reservation
    losses: int = 0  # a connection to the broker, or an acknowledgement
    replays: int = 0
    deletes: int = 0  # an operator deletes the letter, which goes into the bin
    undoes: int = 0  # an operator brings it back
    snoozes: int = 0
    holds: int = 0  # a hold or a limit keeps a reserved attempt from its begin
    backs: int = 0  # attempts that a shutdown gives back
    stops: int = 0  # a worker is told to stop: its run goes on, or it is killed before its run has ended
    cancels: int = 0
    answers: int = 0  # an answer of the store that is lost: the retry is parked, and published as well
    broken: frozenset[str] = frozenset()


class Msg(NamedTuple):
    """A message of the job."""

    fence: int
    attempt: int
    chain: int  # the number of replays before it


class Rec(NamedTuple):
    """The reservation's record."""

    fence: int
    holder: int
    settled: bool = False


class Worker(NamedTuple):
    """A worker, and its step with a message."""

    pc: str = "idle"
    msg: Msg | tuple[()] = ()
    mine: bool = False  # the broker still has the delivery as this worker's
    cut: int = 0  # from the store
    sure: bool = False  # it has seen that the holder counts as dead, and has not asked for the attempt yet
    later: tuple[()] | tuple[int, bool] = ()  # a settlement for the heartbeat to make up for; of a success?
    doubt: bool = False  # it was cut off, or stood still, since its run began
    stops: bool = False  # it was told to stop, and has said so in the store


class State(NamedTuple):
    """A state of the job, its workers and its places."""

    queue: tuple[Msg, ...]
    workers: tuple[Worker, ...]
    left: tuple[int, ...]  # faults and acts that may still happen, in the order of KINDS
    rec: Rec | None = None
    parked: Msg | None = None
    claimed: str = ""  # the scheduler's step with the parked retry: "", "claimed", "published"
    letter: Msg | None = None
    replaying: str = ""  # the operator's step with the letter: "", "claimed", "published"
    bin: Msg | None = None  # the letter that an operator has deleted, while an undo may bring it back
    dead: bool = False  # a letter in the broker's dead queue: only a broken twin writes one
    # What follows is only watched, and steers nothing.
    told: int = 0  # how often a success was told: its result stored, what follows it sent
    excused: bool = False  # a worker was killed between telling of a success and settling it: at least once
    unheard: bool = False  # a success was heard of, and dropped
    cancelled: bool = False
    chain: int = 0
    starts: int = 0  # of this chain, without those that do not count
    top: int = -1  # the last fence that was started
    going: bool = False  # that run has neither ended nor was it declared lost


KINDS = (
    *("crashes", "cuts", "blinks", "losses", "replays", "snoozes", "holds"),
    *("backs", "stops", "cancels", "answers", "deletes", "undoes"),
)
LIVE = ("run", "ok", "ok2", "told", "fail", "snooze", "back", "onward", "snoozed", "held", "sent", "parking")
DROPPED = "I3 a success was heard and dropped, and the job is a dead letter"
TWICE = "I3 a success was told twice"
AGAIN = "I3 a job started after its success was told"
BOTH = "I3 a success was told, and the job is a dead letter"
BACK = "i6 a run was taken for lost when its worker was back, and had not ended the suspicion yet (allowed)"
BESIDE = "i6 a run began beside one whose worker was cut off, frozen, or had just come back (allowed)"
Step = tuple[str, bool, State, str]  # the label, whether it is a fault, the state after it, what is wrong


def put(s: State, i: int, **changes: Any) -> State:
    """Change a worker."""
    workers = list(s.workers)
    workers[i] = workers[i]._replace(**changes)
    return s._replace(workers=tuple(workers))


def spend(s: State, kind: str) -> State | None:
    """Let a fault or an act happen; None if it may not happen any more."""
    n = KINDS.index(kind)
    return s._replace(left=(*s.left[:n], s.left[n] - 1, *s.left[n + 1 :])) if s.left[n] else None


def send(s: State, msg: Msg | tuple[()]) -> State:
    """Put a message into the queue."""
    return s._replace(queue=tuple(sorted((*s.queue, msg)))) if msg else s


def write(s: State, rec: Rec, rules: Rules) -> State:
    """Write the record. Its time changes: a worker that was about to take it for lost finds that out."""
    if "blind_takeover" in rules.broken:
        return s._replace(rec=rec)
    return s._replace(rec=rec, workers=tuple(w._replace(sure=False) if w.sure else w for w in s.workers))


def extend(s: State, i: int, rules: Rules) -> State:
    """Extend the reservation of a worker, which is in no doubt any more."""
    assert s.rec
    return put(s if "clears_alone" in rules.broken else write(s, s.rec, rules), i, doubt=False)


def settle(s: State, i: int, fence: int, rules: Rules, *, success: bool = False) -> State | None:
    """Settle a reservation; None if the store refuses it.

    `_held` in sql/reservations.py; redis/lua/_settle.lua.
    """
    if s.rec and (s.rec.holder, s.rec.fence) != (i, fence):
        return None
    s = write(s, Rec(fence, i, settled=True), rules)
    if success and fence > 0 and "success_leaves" not in rules.broken:
        s = s._replace(letter=None, replaying="", parked=None, claimed="")
    return s


def steps(s: State, rules: Rules) -> Iterator[Step]:
    """Yield every step from a state."""
    for i, w in enumerate(s.workers):
        yield from of_worker(s, i, w, rules)
        yield from faults(s, i, w, rules)
    yield from of_scheduler(s, rules)
    yield from of_operator(s, rules)


def faults(s: State, i: int, w: Worker, rules: Rules) -> Iterator[Step]:
    """Yield what may happen to a worker at any time."""
    busy = w.pc != "idle" or w.later
    if busy and (t := spend(s, "crashes")):
        t = send(t, w.msg if w.mine else ())
        if t.rec and t.rec.holder == i:
            t = t._replace(rec=t.rec._replace(holder=STOPPED if w.stops else DEAD))
        if w.pc == "told" or w.later[1:] == (True,):
            t = t._replace(told=t.told - 1, excused=True)
        workers = list(t.workers)
        workers[i] = Worker()
        yield f"{i} is killed", True, t._replace(workers=tuple(workers)), ""
    if busy and not w.cut and (rules.gap or w.pc not in ("ok2", "told")):
        for kind, cut, how in (
            ("cuts", LONG, "beyond its reservation"),
            ("blinks", SHORT, "for some seconds"),
        ):
            if t := spend(s, kind):
                yield f"{i} is cut off, or frozen, {how}", True, put(t, i, cut=cut, doubt=True), ""
    if w.cut:
        yield f"{i} reaches the store again", False, put(s, i, cut=0), ""
    if busy and not (w.cut or w.stops) and (t := spend(s, "stops")):
        yield f"{i} is told to stop, and says so", True, put(t, i, stops=True), ""
    if w.mine and (t := spend(s, "losses")):
        again = send(put(t, i, mine=False), w.msg)
        yield f"{i} loses its connection: the broker has {w.msg[0]} again", True, again, ""


def judge(s: State, m: Msg, rules: Rules) -> bool:
    """Whether the holder of the record counts as dead now, for a worker that has the message.

    Its reservation has run out, or a suspicion has lasted. A holder that lives and reaches the store ends a
    suspicion in time, extends what it runs, and settles what it could not settle (heartbeat.py, `_beat`).
    Where no attempt is left, a suspicion is not enough (reservations.py, `_left_of`).
    """
    assert s.rec
    holder = s.rec.holder
    if holder in (DEAD, STOPPED) or "slow_is_dead" in rules.broken:
        return "dead_holds" not in rules.broken
    h = s.workers[holder]
    if h.stops and "stop_is_death" in rules.broken:
        return True
    runs = h.pc in LIVE and bool(h.msg) and h.msg[0] == s.rec.fence
    if h.cut == LONG or not (runs or (h.later and h.later[0] == s.rec.fence)):
        return True
    return h.cut == SHORT and (m.attempt < rules.attempts or "suspicion_ends" in rules.broken)


def of_worker(s: State, i: int, w: Worker, rules: Rules) -> Iterator[Step]:
    """Yield the next steps of a worker."""
    m, pc = w.msg, w.pc
    if w.later and not w.cut:  # heartbeat.py, `_catch_up`
        fence, success = w.later
        t = settle(s, i, fence, rules, success=success)
        yield (
            f"{i} makes up for settling {fence}" + ("" if t else ": refused"),
            False,
            put(t or s, i, later=()),
            "",
        )
    if not m:
        for msg in dict.fromkeys(s.queue):
            queue = list(s.queue)
            queue.remove(msg)
            t = put(s._replace(queue=tuple(queue)), i, pc="got", msg=msg, mine=True)
            yield f"{i} receives {msg.fence}", False, t, ""
        return
    holds = s.rec == Rec(m.fence, i)
    if holds and not w.cut and pc in LIVE and any(other.sure for other in s.workers):  # `ReservedRuns.clear`
        yield f"{i} ends the suspicion, and extends {m.fence}", False, extend(s, i, rules), ""
    if pc == "got" and not w.cut:
        yield from reserve(s, i, w, m, rules)
        if rules.delay and m.fence == 0:  # it came before its time: celery/delays.py, `take_over`
            t = s._replace(parked=m, claimed="") if s.parked is None or s.parked.fence == 0 else s
            yield f"{i} takes {m.fence} over, and parks it", False, put(t, i, pc="ack"), ""
    elif pc == "run":
        yield from ends(s, i, m)
    elif pc in ("ok", "fail", "snooze", "back"):
        yield from check(s, i, w, m, rules)
    elif pc == "ok2":  # celery/run.py, `_succeed`; dramatiq/delivery.py, `Ending`
        t = put(s, i, pc="told")._replace(told=min(2, s.told + 1))
        yield f"{i} tells of the success of {m.fence}", False, t, TWICE if s.told else ""
    elif pc in ("told", "sent"):  # reservations.py, `settle`
        success = pc == "told"
        if w.cut or (rules.behind and success):  # behind.py: the acknowledgement does not wait
            yield f"{i} will settle {m.fence} later", False, put(s, i, pc="ack", later=(m.fence, success)), ""
        else:
            t = settle(s, i, m.fence, rules, success=success)
            yield f"{i} settles {m.fence}" + ("" if t else ": refused"), False, put(t or s, i, pc="ack"), ""
    elif pc == "held":  # engine.py, `_held`: a hold that finds no place gives the attempt back
        yield f"{i} gives the held {m.fence} up", False, put(s, i, pc="forgo"), ""
        yield from onward(s, i, w, m, rules)
    elif pc in ("onward", "snoozed"):
        yield from onward(s, i, w, m, rules)
    elif pc == "parking":  # only in a broken twin
        t = put(s._replace(parked=Msg(m.fence + 1, m.attempt + 1, m.chain)), i, pc="ack")
        yield f"{i} parks {m.fence + 1}", False, t, ""
    elif pc in ("release", "forgo", "ack", "drop"):
        yield from leave(s, i, w, m, rules, holds=holds)


def ends(s: State, i: int, m: Msg) -> Iterator[Step]:
    """Yield the ends of a handler."""
    yield f"{i}: {m.fence} succeeds", False, put(over(s, m), i, pc="ok"), ""
    yield f"{i}: {m.fence} fails", False, put(over(s, m), i, pc="fail"), ""
    if t := spend(s, "snoozes"):
        yield f"{i}: {m.fence} snoozes", False, put(over(t, m), i, pc="snooze"), ""
    if t := spend(s, "backs"):
        yield f"{i}: {m.fence} is interrupted by a shutdown", False, put(over(t, m), i, pc="back"), ""


def leave(s: State, i: int, w: Worker, m: Msg, rules: Rules, *, holds: bool) -> Iterator[Step]:
    """Yield the last steps of a delivery: it is released, acknowledged, or goes back to its queue."""
    if w.pc in ("release", "forgo") and not w.cut:  # sql/reservations.py, `release`; redis/lua/release.lua
        t = s
        if holds:
            t = write(s, Rec(m.fence - 1, i, settled=True), rules)
            t = uncounted(t, m, again=1) if w.pc == "release" else t
        yield f"{i} releases {m.fence}" + ("" if holds else ": refused"), False, put(t, i, pc="drop"), ""
    elif w.pc in ("release", "forgo"):
        yield f"{i} cannot release {m.fence}: it runs out", False, put(s, i, pc="drop"), ""
    else:
        word = "acknowledges" if w.pc == "ack" else "gives back"
        t = put(s, i, pc="idle", msg=(), mine=False, doubt=False)
        yield f"{i} {word} {m.fence}", False, send(t, m) if w.pc == "drop" and w.mine else t, ""
        if w.pc == "ack" and w.mine and (u := spend(t, "losses")):
            yield f"{i} acknowledges {m.fence}, which is lost: the broker has it again", True, send(u, m), ""


def reserve(s: State, i: int, w: Worker, m: Msg, rules: Rules) -> Iterator[Step]:
    """Yield the store's answers to a question for an attempt.

    sql/reservations.py, `reserve` and `_judge`; redis/lua/reserve.lua; reservations.py, `reserve`.
    """
    rec = s.rec
    if rec is None or rec.fence < m.fence:
        yield start(s, i, m, rules)
        if t := spend(s, "holds"):
            mine = w.mine and "hold_acks_first" not in rules.broken
            t = put(write(t, Rec(m.fence, i), rules), i, pc="held", doubt=False, sure=False, mine=mine)
            yield f"{i} reserves {m.fence}, which is held", False, t, ""
    elif rec.fence > m.fence or rec.settled:
        if "no_fence" in rules.broken:
            yield start(s, i, m, rules)
        yield f"{i} drops {m.fence}, a late copy", False, put(s, i, pc="ack"), ""
    else:
        counts = judge(s, m, rules)
        if w.sure and "lost_runs" in rules.broken:
            yield start(s, i, m, rules)
        elif w.sure:
            # A worker that was told to stop has used no attempt: heartbeat.py, `was_stopping`.
            stopped = rec.holder == STOPPED or (rec.holder != DEAD and s.workers[rec.holder].stops)
            counted = not stopped or "stop_counts" in rules.broken
            goes = "release" if "stop_releases" in rules.broken else "snoozed"
            t = put(write(s, Rec(m.fence, i), rules), i, pc="onward" if counted else goes, sure=False)
            wrong = "" if counts or rec.holder in (DEAD, STOPPED) else BACK
            if stopped and counted:
                wrong = "I7 a stop has used an attempt"
            elif wrong and s.workers[rec.holder].pc in LIVE and not s.workers[rec.holder].doubt:
                wrong = "I6 a run was taken for lost after its worker had ended the suspicion"
            yield f"{i} takes {m.fence} for lost", False, over(t, m), wrong
        elif counts:
            yield f"{i} sees that the holder of {rec.fence} counts as dead", False, put(s, i, sure=True), ""
        t = put(s, i, pc="idle", msg=(), mine=False, sure=False)  # carrying.py, `postpone`
        yield f"{i} puts {m.fence} off", False, send(t, m) if w.mine else t, ""


def start(s: State, i: int, m: Msg, rules: Rules) -> Step:
    """Begin a run, and say what is wrong with that."""
    wrong = []
    starts = s.starts + 1 if m.chain == s.chain else 1
    if starts > rules.attempts:
        wrong.append("I2 more starts than max_attempts")
    if m.fence <= s.top:
        wrong.append("I4 an attempt started again, or after a later one")
    elif s.going:
        wrong.append("I4 an attempt started before the one before it had ended")
    if s.told:
        wrong.append(AGAIN)
    if s.cancelled:
        wrong.append("I3 a job started after it was cancelled")
    beside = [o for n, o in enumerate(s.workers) if n != i and o.pc == "run"]
    if any(not o.doubt for o in beside):
        wrong.append("I6 a run began beside one that was never cut off")
    elif beside:
        wrong.append(BESIDE)
    t = put(write(s, Rec(m.fence, i), rules), i, pc="run", doubt=False, sure=False)
    t = t._replace(chain=m.chain, starts=starts, top=max(s.top, m.fence), going=True)
    return f"{i} begins {m.fence} (attempt {m.attempt})", False, t, "; ".join(wrong)


def over(s: State, m: Msg) -> State:
    """Watch the end of a run's code."""
    return s._replace(going=False) if m.fence == s.top else s


def uncounted(s: State, m: Msg, *, again: int = 0) -> State:
    """Watch a snooze and a run given back: they do not count, and the latter begins again."""
    return s._replace(starts=s.starts - 1, top=s.top - again) if m.chain == s.chain else s


def check(s: State, i: int, w: Worker, m: Msg, rules: Rules) -> Iterator[Step]:
    """Yield the answers to whether a run still counts; the question extends what it holds.

    reservations.py, `check`. Where the store does not answer, the run waits for it.
    """
    goes = {"ok": "ok2", "fail": "onward", "snooze": "snoozed", "back": "release"}[w.pc]
    if w.cut:
        if w.pc == "back" or "unanswered_counts" in rules.broken:
            yield f"{i} cannot ask the store about {m.fence}: it counts", False, put(s, i, pc=goes), ""
    elif s.rec == Rec(m.fence, i):
        early = {"mine": False} if "ack_first" in rules.broken else {}
        yield f"{i} asks, and still holds {m.fence}", False, put(extend(s, i, rules), i, pc=goes, **early), ""
    else:
        t = put(s, i, pc="drop")
        yield f"{i} asks, and has lost {m.fence}", False, t._replace(unheard=True) if w.pc == "ok" else t, ""


def onward(s: State, i: int, w: Worker, m: Msg, rules: Rules) -> Iterator[Step]:
    """Yield the ways on: a retry is parked or published, or the job is a dead letter.

    carrying.py, `_carry` and `_send_on`; keeping.py, `is_buried`, `bury` and `park`.
    """
    snoozed = w.pc in ("snoozed", "held")
    if not snoozed and m.attempt >= rules.attempts:
        yield from bury(s, i, w, m, rules)
        return
    after = Msg(m.fence + 1, m.attempt + (not snoozed), m.chain)
    if w.pc == "held" and "hold_keeps_fence" in rules.broken:
        after = m
    watched = s
    if w.pc == "snoozed":
        s = uncounted(s, m)
    yield f"{i} publishes {after.fence}", False, put(send(s, after), i, pc="sent"), ""
    if w.cut:
        return
    t = settle(s, i, m.fence, rules)
    if t is None:
        yield f"{i} may not park {after.fence}", False, put(watched, i, pc="drop"), ""
    elif "park_apart" in rules.broken:
        yield f"{i} settles {m.fence}, and is to park {after.fence}", False, put(t, i, pc="parking"), ""
    elif t.parked is None or t.parked.fence <= after.fence:
        t = t._replace(parked=after, claimed="")
        yield f"{i} parks {after.fence}", False, put(t, i, pc="ack"), ""
        if u := spend(t, "answers"):
            both = put(send(u, after), i, pc="sent")
            yield f"{i} parks {after.fence}, hears no answer, and publishes it", True, both, ""


def bury(s: State, i: int, w: Worker, m: Msg, rules: Rules) -> Iterator[Step]:
    """Yield the burial of a job; a run with a reservation waits for the store."""
    if w.cut:
        if "buries_anywhere" in rules.broken:
            t = put(s._replace(dead=True), i, pc="ack", later=(m.fence, False))
            yield f"{i} buries {m.fence} in the broker", False, t, ""
    elif t := settle(s, i, m.fence, rules):
        t = t._replace(letter=Msg(m.fence + 1, m.attempt, m.chain), replaying="")
        yield f"{i} buries {m.fence}", False, put(t, i, pc="ack"), ""
    else:
        yield f"{i} may not bury {m.fence}", False, put(s, i, pc="drop"), ""


def of_scheduler(s: State, rules: Rules) -> Iterator[Step]:
    """Yield the steps of a scheduler: claim, publish, delete; a claim that runs out is free again."""
    if s.parked and not s.claimed:
        if "unpark_first" in rules.broken and (t := spend(s, "crashes")):
            yield "a scheduler deletes the retry, and is killed", True, t._replace(parked=None), ""
        yield f"a scheduler claims {s.parked.fence}", False, s._replace(claimed="claimed"), ""
    elif s.claimed == "claimed" and s.parked:
        yield (
            f"a scheduler publishes {s.parked.fence}",
            False,
            send(s, s.parked)._replace(claimed="published"),
            "",
        )
    elif s.claimed == "published":
        yield "a scheduler deletes what it has published", False, s._replace(parked=None, claimed=""), ""
    if s.claimed and (t := spend(s, "crashes")):
        yield "the scheduler is killed", True, t._replace(claimed=""), ""


def of_operator(s: State, rules: Rules) -> Iterator[Step]:
    """Yield the steps of an operator: a replay claims, publishes and deletes; a cancel is one step.

    replaying.py, dead_letters.py; waiting.py, which refuses what is claimed, or has begun. An undo looks at
    the record in the same step: store/sql/bin.py, `take_out`; redis/lua/restore.lua.
    """
    yield from of_bin(s, rules)
    if s.letter and not s.replaying and (t := spend(s, "replays")):
        yield "a replay claims the letter", False, t._replace(replaying="claimed"), ""
        if "delete_first" in rules.broken and (u := spend(t, "crashes")):
            yield "a replay deletes its letter, and is killed", True, u._replace(letter=None), ""
    elif s.replaying == "claimed" and s.letter:
        again = Msg(s.letter.fence + 1, 1, s.letter.chain + 1)
        yield f"a replay publishes {again.fence}", False, send(s, again)._replace(replaying="published"), ""
    elif s.replaying == "published":
        yield "a replay deletes its letter", False, s._replace(letter=None, replaying=""), ""
    if s.replaying and (t := spend(s, "crashes")):
        yield "the replay is killed", True, t._replace(replaying=""), ""
    if s.parked and not s.claimed and (t := spend(s, "cancels")):
        t = t._replace(parked=None, cancelled=True)
        if "cancel_forgets" in rules.broken:
            yield "an operator cancels the retry", False, t, ""
        elif s.rec is None or s.rec.fence < s.parked.fence:
            t = write(t, Rec(s.parked.fence, OPERATOR, settled=True), rules)
            yield f"an operator cancels the retry, and settles {s.parked.fence}", False, t, ""


def of_bin(s: State, rules: Rules) -> Iterator[Step]:
    """Yield a deletion of the letter, and an undo, which brings it back unless its job has begun again."""
    if s.letter and not s.replaying and (t := spend(s, "deletes")):
        yield "an operator deletes the letter", False, t._replace(letter=None, bin=s.letter), ""
    if s.bin and not s.letter and (t := spend(s, "undoes")):
        begun = s.rec and (s.rec.fence, not s.rec.settled) > (s.bin.fence, False)
        if not begun or "undo_is_blind" in rules.broken:
            yield f"an undo brings letter {s.bin.fence} back", False, t._replace(letter=s.bin, bin=None), ""


def at_rest(s: State) -> bool:
    """Whether nothing is under way: no message, no retry, no step of anybody."""
    return not (s.queue or s.parked or s.replaying) and all(w.pc == "idle" and not w.later for w in s.workers)


def wrong_in(s: State) -> str:
    """Return what is wrong in a state; the steps themselves tell of what must not happen."""
    if s.letter and s.dead:
        return "I3 two dead letters, of store and broker"
    has_place = s.queue or s.parked or s.letter or s.dead or s.told or s.excused or s.cancelled or s.bin
    if not has_place and all(w.pc == "idle" or (w.pc in ("ack", "drop") and not w.mine) for w in s.workers):
        return "I1 the job is lost"
    if at_rest(s):
        if s.told and (s.letter or s.dead):
            return BOTH
        if s.unheard and (s.letter or s.dead):
            return DROPPED
    return ""


def canonical(s: State) -> State:
    """Return the state with the two workers, which are alike, in one order."""
    a, b = s.workers
    if a < b or (a == b and (s.rec is None or s.rec.holder != 1)):
        return s
    rec = s.rec
    if rec and rec.holder in (0, 1):
        rec = rec._replace(holder=1 - rec.holder)
    return s._replace(workers=(b, a), rec=rec)


class Result(NamedTuple):
    """What a visit of all states has found."""

    states: int
    seconds: float
    seen: Mapping[str, list[str]]  # each violation, and what is allowed, with its shortest trace

    @property
    def wrong(self) -> dict[str, list[str]]:
        """The violations: an invariant's name begins with a capital letter."""
        return {what: way for what, way in self.seen.items() if what[0] == "I"}


def explore(rules: Rules, known: frozenset[str] | None = None) -> Result:
    """Visit every state, breadth-first; a first visit is by a shortest way.

    With `known`, end at the first violation that is not among these: a broken twin may have no end of states.
    """
    began = time.monotonic()
    job, limits = Msg(0, 1, 0), tuple(getattr(rules, kind) for kind in KINDS)
    first = State(() if rules.delay == "stored" else (job,), (Worker(), Worker()), limits)
    if rules.delay in ("stored", "both"):
        first = first._replace(parked=job)
    seen = {first: 0}
    states, parents, ways_back, ends_at = [first], [-1], [list[int]()], list[int]()
    wrong: dict[str, tuple[int, State | None]] = {}

    def result() -> Result:
        ways = {what: trace(rules, states, parents, *where) for what, where in sorted(wrong.items())}
        return Result(len(states), time.monotonic() - began, ways)

    for n, s in enumerate(states):
        if known is not None and any(what[0] == "I" and what not in known for what in wrong):
            return result()
        if found := wrong_in(s):
            wrong.setdefault(found, (n, None))
        if at_rest(s):
            ends_at.append(n)
        for _label, is_fault, after, found in steps(s, rules):
            t = canonical(after)
            for each in found.split("; ") if found else ():
                wrong.setdefault(each, (n, t))
            m = seen.get(t)
            if m is None:
                m = seen[t] = len(states)
                states.append(t)
                parents.append(n)
                ways_back.append([])
            if not is_fault:
                ways_back[m].append(n)
    # I5: without another fault, an end can be reached from everywhere.
    can_end, stack = bytearray(len(states)), ends_at
    while stack:
        n = stack.pop()
        if not can_end[n]:
            can_end[n] = 1
            stack.extend(ways_back[n])
    if (n := can_end.find(0)) >= 0:
        wrong["I5 stuck: no end can be reached"] = n, None
    return result()


def trace(rules: Rules, states: list[State], parents: list[int], n: int, last: State | None) -> list[str]:
    """Return the labels on the way to a state, and to one after it; each worker keeps its number."""
    way = [] if last is None else [last]
    while n > 0:
        way.append(states[n])
        n = parents[n]
    s, labels = states[0], []
    for target in reversed(way):
        label, s = next((label, t) for label, _, t, _ in steps(s, rules) if canonical(t) == target)
        labels.append(label)
    return labels


# The scenes ----

Scene = tuple[Rules, set[str]]  # and the violations that remain by the protocol's nature

#: Each scene has all its faults at once, at any moment.
SCENES: dict[str, Scene] = {
    "kills alone": (Rules(3, crashes=3), set()),
    "lost connections alone": (Rules(3, crashes=0, losses=3), set()),
    "shutdowns, a lost connection": (Rules(backs=2, losses=1, crashes=0), set()),
    "operator and scheduler": (Rules(replays=1, cancels=1, losses=1), set()),
    "one attempt, out of reach for seconds": (Rules(1, blinks=1, losses=1), set()),
    "one attempt, out of reach for seconds, twice": (Rules(1, blinks=2, losses=2, crashes=0), set()),
    "two attempts, out of reach for seconds": (Rules(blinks=1, losses=1), {DROPPED}),
    "one attempt, out of reach for long": (Rules(1, cuts=1, losses=1), {DROPPED}),
    "two attempts, out of reach for long": (Rules(cuts=1, losses=1), {DROPPED}),
    "one attempt, a snooze": (Rules(1, snoozes=1, losses=1), set()),
    "one attempt, a snooze, a shutdown": (Rules(1, snoozes=1, backs=1, blinks=1), set()),
    "one attempt, stops that end in kills": (Rules(1, stops=2, crashes=2, losses=1), set()),
    "two attempts, a stop, out of reach for seconds": (Rules(stops=1, blinks=1), {DROPPED}),
    "one attempt, a stop, out of reach for long": (Rules(1, stops=1, cuts=1, losses=1), {DROPPED}),
    "one attempt, a replay": (Rules(1, replays=1, losses=1), set()),
    "one attempt, a replay, out of reach for seconds": (Rules(1, replays=1, blinks=1), set()),
    "one attempt, a replay, a deletion, an undo": (
        Rules(1, replays=1, deletes=1, undoes=1, losses=1),
        set(),
    ),
    "two replays, two deletions, two undoes": (
        Rules(1, replays=2, deletes=2, undoes=2, crashes=1),
        set(),
    ),
    "an undo, out of reach for seconds": (Rules(1, replays=1, deletes=1, undoes=1, blinks=1), set()),
    "an answer is lost, a retry is cancelled": (Rules(answers=1, cancels=1, losses=1), set()),
    "a delay that its producer stores": (Rules(delay="stored", cancels=1, losses=1), set()),
    "a delay that a worker takes over": (Rules(delay="sent", cancels=1, losses=1), set()),
    "a delay that is stored, and sent as well": (Rules(1, delay="both", cancels=1, losses=1), set()),
    "a hold, twice": (Rules(1, holds=2, losses=1), set()),
    "two attempts, each held": (Rules(holds=2, losses=1, crashes=1), set()),
    "a held job is cancelled, or a copy of it comes": (Rules(1, holds=1, cancels=1, losses=2), set()),
    "a hold, out of reach for seconds": (Rules(1, holds=1, blinks=1, losses=1), set()),
    "a hold, out of reach for long": (Rules(1, holds=1, cuts=1, losses=1), {DROPPED}),
    "a delay that a worker takes over, and a hold": (Rules(1, delay="sent", holds=1, losses=1), set()),
    "settled behind, an acknowledgement lost": (Rules(behind=True, crashes=0, losses=1), set()),
    "the same, out of reach for long": (
        Rules(behind=True, crashes=0, cuts=1, losses=1),
        {DROPPED, TWICE, AGAIN, BOTH},
    ),
    "cut off for seconds between telling and settling": (
        Rules(1, gap=True, crashes=0, blinks=1, losses=1),
        set(),
    ),
    "cut off for long between telling and settling": (
        Rules(gap=True, crashes=0, cuts=1, losses=1),
        {DROPPED, TWICE, AGAIN, BOTH},
    ),
}
#: With these, some minutes and some gigabytes.
DEEP: dict[str, Scene] = {
    "three attempts": (Rules(3, cuts=1, losses=1), {DROPPED}),
    "two attempts, replayed": (Rules(replays=1, cuts=1, losses=1), {DROPPED}),
    "two attempts, a snooze, a shutdown": (Rules(snoozes=1, backs=1, cuts=1, losses=1), {DROPPED}),
    "two attempts, twice of all": (Rules(cuts=1, blinks=1, losses=2, crashes=2), {DROPPED}),
}
#: What each twin breaks, and where that must be found.
TWINS: dict[str, tuple[str, Rules]] = {
    "no_fence": ("a late copy runs", Rules(losses=1)),
    "lost_runs": ("a lost attempt runs again", Rules(losses=1)),
    "park_apart": ("a run is settled in one step, and parked in another", Rules()),
    "ack_first": ("the message is acknowledged before the decision is carried out", Rules()),
    "unpark_first": ("a parked retry is deleted before it is published", Rules()),
    "delete_first": ("a letter is deleted before it is published", Rules(1, replays=1)),
    "dead_holds": ("a dead worker never counts as dead", Rules()),
    "slow_is_dead": ("a slow worker counts as dead", Rules(losses=1)),
    "blind_takeover": (
        "a run is taken for lost without a look at its record's time",
        Rules(blinks=1, losses=1),
    ),
    "clears_alone": ("who ends a suspicion does not extend its reservation", Rules(blinks=1, losses=1)),
    "suspicion_ends": ("a suspicion is enough where no attempt is left", Rules(1, blinks=1, losses=1)),
    "unanswered_counts": ("a success counts though the store did not answer", Rules(cuts=1, losses=1)),
    "buries_anywhere": ("a job is buried in the broker while the store is away", Rules(1, cuts=1, losses=1)),
    "success_leaves": ("a success leaves the letter of its job", Rules(1, snoozes=1)),
    "success_leaves a replay's": ("the same, of a replay", Rules(1, replays=1)),
    "undo_is_blind": (
        "an undo does not look whether the job has begun",
        Rules(1, replays=1, deletes=1, undoes=1),
    ),
    "stop_counts": ("a worker that is killed while it stops has used an attempt", Rules(stops=1)),
    "stop_releases": ("its attempt begins anew by the same message", Rules(stops=1)),
    "stop_is_death": ("a worker that stops counts as dead at once", Rules(stops=1, losses=1)),
    "hold_acks_first": ("a held job is acknowledged before it waits in the store", Rules(1, holds=1)),
    "hold_keeps_fence": ("a held job goes on under the fence that it came with", Rules(1, holds=1)),
    "cancel_forgets": ("a cancelled retry is deleted, and no more", Rules(answers=1, cancels=1, crashes=0)),
    "cancel_forgets a delay's": ("the same, of a delay", Rules(1, delay="sent", cancels=1, losses=1)),
}


def found_in_twin(name: str) -> Result:
    """Return the first violation of a broken twin that the protocol does not have."""
    _, rules = TWINS[name]
    whole = explore(rules)
    broken = explore(rules._replace(broken=frozenset({name.partition(" ")[0]})), frozenset(whole.wrong))
    return broken._replace(seen={what: way for what, way in broken.wrong.items() if what not in whole.wrong})


def main(words: list[str]) -> int:
    """Print the tables; return 1 if one of them is not as it should be."""
    scenes, failed = {**SCENES, **(DEEP if "--deep" in words else {})}, list[str]()
    tables = [word for word in words if not word.startswith("-")] or ["scenes", "twins"]
    if "scenes" in tables:
        print("\nThe protocol, and what remains by its nature")
        for name, (rules, remains) in scenes.items():
            result = explore(rules)
            verdict = "ok" if set(result.wrong) == remains else "NOT AS EXPECTED"
            failed += [name] * (set(result.wrong) != remains)
            print(f"{name:52} {result.states:8,} states {result.seconds:5.1f} s  {verdict}", flush=True)
            show(result.seen if "-v" in words else result.wrong, whole="-v" in words)
    if "twins" in tables:
        print("\nEach twin is broken on purpose, and must be found")
        for name, (broken, _) in TWINS.items():
            result = found_in_twin(name)
            failed += [name] * (not result.seen)
            print(f"{broken:72} {'found' if result.seen else 'NOT FOUND'}", flush=True)
            show(result.seen, whole="-v" in words)
    print(f"\nFAILED: {', '.join(failed)}" if failed else "\npassed")
    return 1 if failed else 0


def show(seen: Mapping[str, list[str]], *, whole: bool) -> None:
    """Print violations, and their traces if asked to."""
    for what, way in seen.items():
        print(f"      {what} ({len(way)} steps)")
        for label in way if whole else ():
            print(f"            {label}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
