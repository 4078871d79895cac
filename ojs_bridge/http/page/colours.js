// One fixed colour for a job type: the first that it was given in this browser.

const KEY = "ojs-bridge-colours", COLOURS = 7, MOST = 500;
export const OTHER = "type-8";
let known = null;

export function colourFor(type) {
  known ||= JSON.parse(localStorage.getItem(KEY) || "[]");
  if (!known.includes(type)) {
    known = [...known, type].slice(0, MOST);
    localStorage.setItem(KEY, JSON.stringify(known));
  }
  const place = known.indexOf(type);
  return place < 0 ? OTHER : `type-${(place % COLOURS) + 1}`;
}
