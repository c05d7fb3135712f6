/** Waiting between two questions. */

/** After `ms`, and when the page is seen; at once when it comes to be seen again. Raises the AbortError of `signal`. */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const ended = new AbortController(); // takes the listeners away
    const end = (settle, value) => {
      clearTimeout(timer);
      ended.abort();
      settle(value);
    };
    const timer = setTimeout(() => document.hidden || end(resolve), ms);
    document.addEventListener("visibilitychange", () => document.hidden || end(resolve), { signal: ended.signal });
    signal.addEventListener("abort", () => end(reject, signal.reason), { signal: ended.signal });
    if (signal.aborted) end(reject, signal.reason);
  });
}
