// Keeps the page up to date, unless the reader is in the middle of something.

import { useEffect, useRef, useState } from "./base.js";
import { desk, set, trouble } from "./desk.js";

const PERIOD = 5_000, LONGEST = 60_000;
// The status of an answer without the store, and of those that tell nothing of the one who asks.
const AWAY = 503, BROKEN = 500;
// A server that needs long for an answer is asked less often: a tenth of its time is enough.
const SHARE = 10;
const loads = new Set(), holds = new Set();
let wait = PERIOD, timer = 0, turn = 0;

export function start() {
  document.addEventListener("visibilitychange", begin);
  timer = setTimeout(go, wait, turn);
}

// "Freeze" stops the updates, and begins them again.
export function freeze() {
  set({ isFrozen: !desk.isFrozen });
  begin();
}

function begin() {
  clearTimeout(timer);
  turn += 1;
  if (!document.hidden && !desk.isFrozen) go(turn);
}

async function go(number) {
  const begun = performance.now();
  const isHeld = holds.size > 0 || Boolean(document.querySelector("dialog[open]"));
  set({ isHeld });
  if (!document.hidden && !isHeld) await attempt([...loads], begun);
  // The tab was hidden, or the button was pressed: a newer turn goes on, or none.
  if (number === turn) timer = setTimeout(go, wait, number);
}

async function attempt(works, begun) {
  try {
    await Promise.all(works.map((work) => work()));
    succeeded();
    wait = Math.min(Math.max(PERIOD, SHARE * (performance.now() - begun)), LONGEST);
  } catch (error) {
    failed(error);
    wait = Math.min(2 * wait, LONGEST);
  }
}

function succeeded() {
  if (desk.failedAt) trouble(null);
  const isAway = desk.now?.verdict.level === "away" && desk.now.pulse.store.status === "away";
  set({ failedAt: null, ...(!isAway && { away: null, updatedAt: new Date() }) });
}

// While the store is away one box says so. What was seen last stays, and says of when it is.
function failed(error) {
  if (error.status > 0 && error.status < BROKEN) return trouble(error);
  const since = desk.failedAt || new Date();
  set({ failedAt: since });
  if (error.status === AWAY) return set({ away: desk.away || { since, message: error.message } });
  return trouble(error);
}

// Asks nothing while `isOn`: rows are chosen, or something is typed.
export function useHold(isOn) {
  const mine = useRef({}).current;
  useEffect(() => {
    if (isOn) holds.add(mine);
    else holds.delete(mine);
    return () => holds.delete(mine);
  }, [isOn]);
}

// What `load` answers, now and at each turn: {data, error, at, reload}. The last answer stays until there is another.
export function useLive(load, deps) {
  const [state, setState] = useState({ data: null, error: null, at: null, isOld: false });
  const latest = useRef(load), asks = useRef(() => null);
  latest.current = load;
  useEffect(() => {
    let isOn = true;
    async function ask() {
      try {
        const data = await latest.current();
        if (isOn) setState({ data, error: null, at: new Date(), isOld: false });
      } catch (error) {
        if (isOn) setState((before) => ({ ...before, error, isOld: false }));
        throw error;
      }
    }
    asks.current = () => ask().catch(failed);
    loads.add(ask);
    setState((before) => ({ ...before, isOld: before.data !== null }));
    asks.current();
    return () => {
      isOn = false;
      loads.delete(ask);
    };
  }, deps);
  return { ...state, reload: () => asks.current() };
}

// Draws again each second, for what counts down.
export function useTick(isOn = true) {
  const [, setNow] = useState(0);
  useEffect(() => {
    if (!isOn) return undefined;
    const each = setInterval(() => setNow(Date.now()), 1000);
    return () => clearInterval(each);
  }, [isOn]);
}
