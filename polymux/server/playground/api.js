/** Talks to the server. Knows its routes, its errors and the key; nothing of the page. */

import { toForm, toJson } from "./request.js";
import { events } from "./sse.js";

const KEY = "polymux-api-key";
const BASE = new URL("./", document.baseURI); // the page may be mounted below a path

export const apiUrl = (path) => new URL(path, BASE).href;

/** The key lives as long as the tab; only requests to this server carry it. */
export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the server answered in place of a success; `param` is the field at fault, or null. */
export class ApiError extends Error {
  constructor(status, { message, param = null, code = null }, retryAfter = null) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

export async function models() {
  return (await (await call("v1/models")).json()).data;
}

/** The word that /health says: ready, loading, asleep, ...; or unreachable. */
export async function status() {
  try {
    const response = await fetch(apiUrl("health"), { cache: "no-store" });
    return (await response.json()).status ?? "unreachable";
  } catch {
    return "unreachable";
  }
}

export async function wakeUp() {
  await call("v1/omni/wakeup", { method: "POST" });
}

/** Yields {kind: "progress" | "preview" | "result", ...} until the pictures are there. Raises ApiError. */
export async function* generate(request, { previews, signal }) {
  let response;
  try {
    response = await send(request, previews, signal);
  } catch (error) {
    if (!(previews > 0 && error.param === "partial_images")) throw error;
    response = await send(request, 0, signal); // this model can do it without
  }
  let count = 0;
  for await (const { data } of events(response.body)) {
    const event = parse(data);
    if (event.error) throw new ApiError(response.status, event.error);
    const kind = KINDS[event.type.split(".").at(-1)];
    if (kind === "result") count += 1;
    if (kind !== undefined) yield { ...event, kind };
  }
  if (count === 0) throw new ApiError(response.status, { message: "The server ended its answer before there was a picture." });
}

const KINDS = { progress: "progress", partial_image: "preview", completed: "result" };

function send(request, previews, signal) {
  const streaming = { stream: true, stream_progress: true, ...(previews > 0 && { partial_images: previews }) };
  const sent = { ...request, fields: { ...request.fields, ...streaming } };
  const body = request.operation === "edits" ? toForm(sent) : toJson(sent.fields);
  const headers = request.operation === "edits" ? {} : { "content-type": "application/json" };
  return call(`v1/images/${request.operation}`, { method: "POST", body, headers, signal });
}

async function call(path, { headers = {}, ...options } = {}) {
  const authorization = key.get() === null ? {} : { authorization: `Bearer ${key.get()}` };
  let response;
  try {
    response = await fetch(apiUrl(path), { ...options, headers: { ...headers, ...authorization }, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached." });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let detail;
  try {
    detail = (await response.json()).error;
  } catch {
    detail = null;
  }
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  return new ApiError(response.status, detail ?? { message: `The server answered with status ${response.status}.` }, retryAfter);
}

/** JSON whose seeds stay exact: they have up to 64 bits, more than a JavaScript number holds. */
function parse(text) {
  return JSON.parse(text.replace(/"seed":\s*(\d+)/g, '"seed":"$1"'));
}
