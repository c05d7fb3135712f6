/** Talks to the server. Knows its errors and the key, and the routes that all kinds of models have. */

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

/** The answer, if it is a success. Raises ApiError, and AbortError. */
export async function call(path, { headers = {}, ...options } = {}) {
  const authorization = key.get() === null ? {} : { authorization: `Bearer ${key.get()}` };
  let response;
  try {
    response = await fetch(apiUrl(path), { ...options, headers: { ...headers, ...authorization }, cache: "no-store" });
  } catch (error) {
    throw lost(error);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

/** A file that the server has. Raises as `call` does. */
export async function download(path, options = {}) {
  const response = await call(path, options);
  try {
    return { blob: await response.blob(), headers: response.headers };
  } catch (error) {
    throw lost(error);
  }
}

export function post(path, json, signal) {
  return call(path, { method: "POST", body: json, headers: { "content-type": "application/json" }, signal });
}

function lost(error) {
  return error.name === "AbortError" ? error : new ApiError(0, { message: "The server cannot be reached." });
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
