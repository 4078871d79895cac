// What the whole page knows: the role of the token, whether the store is away, the last pulse, and what is to be told.

import { useEffect, useReducer } from "./base.js";
import { clock } from "./words.js";

export const desk = {
  role: "", away: null, now: null, isFrozen: false, isHeld: false, failedAt: null, updatedAt: null,
  told: "", undone: "", wrong: "", dialog: null,
};
const listeners = new Set();

export function set(changes) {
  if (Object.entries(changes).every(([name, value]) => desk[name] === value)) return;
  Object.assign(desk, changes);
  document.body.toggleAttribute("data-away", Boolean(desk.away));
  for (const listener of listeners) listener();
}

// What a component reads of the desk it sees anew at each change.
export function useDesk() {
  const [, again] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    listeners.add(again);
    return () => listeners.delete(again);
  }, []);
  return desk;
}

// What this token may do: "replay", "delete", or "write" for all else. While the store is away nothing can be written.
export function may(what) {
  if (desk.away || desk.role === "reader") return false;
  return desk.role !== "replayer" || what === "replay";
}

// Tells what was done, and what could not be done, which stays until the next deed.
export function told(done, undone = "") {
  set({ told: done && !undone ? `${done} at ${clock(new Date())}.` : "", undone, wrong: "" });
}

export function trouble(error) {
  set({ wrong: error?.message || "" });
}

let newest = 0;

// Does what the reader has asked for, and then hides the last message, unless something else was asked for meanwhile.
export async function guarded(work) {
  const turn = (newest += 1);
  try {
    await work();
    if (turn === newest) trouble(null);
  } catch (error) {
    trouble(error);
  }
}

export const copy = (text, what) => guarded(async () => {
  await navigator.clipboard.writeText(text);
  told(`Copied ${what}`);
});

export const open = (dialog) => set({ dialog });
export const close = () => set({ dialog: null });
