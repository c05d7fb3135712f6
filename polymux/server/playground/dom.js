/** Small helpers for the document. Knows nothing of models or requests. */

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

/** A new element. Properties are set as properties; children are elements or text, never HTML. */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  const { data = {}, attributes = {}, ...plain } = properties;
  Object.assign(made, plain);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Tell those who cannot see the page. What is said again is read again. */
export function say(text) {
  const region = $("#announce");
  region.textContent = region.textContent === text ? `${text}\u00a0` : text;
}

/** Rows of a description list from pairs of words; what is empty is left out. */
export function describe(list, pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  list.replaceChildren(
    ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))),
  );
}

/** Put text on the clipboard; where the browser forbids it (plain http), show it to be copied by hand. */
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const dialog = $("#snippet");
    const area = $("textarea", dialog);
    area.value = text;
    dialog.showModal();
    area.select();
    return;
  }
  say("Copied");
  const words = button.dataset.words ?? button.textContent;
  button.dataset.words = words;
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = words), 1500);
}

export function calm() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
