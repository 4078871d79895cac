// The server's routes; a body is an object, or JSON already.
// Everything that job data says stays text: nothing here or elsewhere makes HTML of it.

import { set } from "./desk.js";

const ROOT = new URL("ojs/v1/", document.baseURI);
const TOKEN = "ojs-bridge-token";

export class Refused extends Error {
  constructor(status, message, details) {
    super(message);
    this.status = status;
    this.details = details || {};
  }
}

export async function call(method, path, { query = {}, body } = {}) {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN) || "";
    const answer = await send(method, path, query, body, token);
    if (answer.status === 401) {
      // Another request may have asked meanwhile.
      if (token === (sessionStorage.getItem(TOKEN) || "")) await askForToken(token);
      continue;
    }
    const role = answer.headers.get("X-OJS-Bridge-Role");
    if (role) set({ role });
    if (!answer.ok) throw await refused(answer);
    return answer.json();
  }
}

export const pathOf = (kind, id, ...rest) => [kind, encodeURIComponent(id), ...rest].join("/");

async function send(method, path, query, body, token) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) if (value) url.searchParams.set(name, value);
  const headers = { Accept: "application/json", "X-OJS-Bridge": "1" };
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(url, { method, headers, body: typeof body === "object" ? JSON.stringify(body) : body });
  } catch {
    throw new Refused(0, "The server cannot be reached.");
  }
}

async function refused(answer) {
  try {
    const { error } = await answer.json();
    return new Refused(answer.status, error.message, error.details);
  } catch {
    return new Refused(answer.status, `The server answered with status ${answer.status}.`);
  }
}

async function askForToken(refused) {
  const dialog = document.getElementById("token-dialog"), field = document.getElementById("token");
  // Open already, it asks for another request, and somebody may be typing.
  if (!dialog.open) {
    field.value = "";
    document.getElementById("token-refused").hidden = !refused;
    dialog.showModal();
  }
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  sessionStorage.setItem(TOKEN, field.value);
}
