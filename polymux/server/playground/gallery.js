/** The results. What is different between kinds is in KINDS. */

import { $, element, say } from "./dom.js";
import { KINDS } from "./kinds.js";

let count = 0;

/** The element of a result, or words in its place. */
export function viewOf(result) {
  if (result.url !== null) return KINDS[result.kind].view(result);
  return element("p", { className: "hint waiting" }, "Fetching the file…");
}

/**
 * A result: its file, and how it came to be. `facts` are pairs of words to show, `request` what gives it again if that is
 * known. Where `blob` is null, `load` gets it, and `type` says what it will be; `remote` is its id where the server keeps it.
 */
export class Result {
  constructor(kind, { blob, type = blob?.type, load = null, remote = null, extension, seed, prompt = null, request, facts }) {
    count += 1;
    this.id = count;
    this.name = `polymux-${count}${seed === null ? "" : `-seed-${seed}`}.${extension}`;
    this.prompt = prompt ?? request.fields.prompt ?? "";
    Object.assign(this, { kind, type, remote, request, facts, blob: null, url: null });
    this.loading = null;
    this.get = load;
    if (blob) this.#have(blob);
  }

  /** Get the file. Nothing if it is there. */
  async load() {
    if (this.url !== null) return;
    this.loading ??= this.get().finally(() => (this.loading = null));
    const blob = await this.loading;
    if (this.url === null) this.#have(blob);
  }

  #have(blob) {
    this.blob = blob;
    this.url = URL.createObjectURL(blob);
  }
}

export class Gallery {
  /** `onSelect` is called with the result that was chosen, or with null when there is none any more. */
  constructor(root, onSelect) {
    this.root = root;
    this.list = $("ul", root);
    this.onSelect = onSelect;
    this.results = []; // newest first
    this.selected = null;
  }

  add(result, { select = true } = {}) {
    this.results.unshift(result);
    const title = `Result ${result.id}: ${result.prompt}`;
    const attributes = { "aria-label": title, "aria-pressed": "false" };
    const button = element("button", { type: "button", title: result.prompt, attributes, onclick: () => this.select(result) });
    this.list.prepend(element("li", { data: { result: result.id } }, button));
    this.refresh(result);
    this.root.hidden = false;
    if (select) this.select(result);
  }

  has(remote) {
    return this.results.some((result) => result.remote === remote);
  }

  /** Its file has come. */
  refresh(result) {
    if (this.results.includes(result)) $("button", this.#item(result)).replaceChildren(KINDS[result.kind].thumbnail(result));
  }

  select(result) {
    this.selected = result;
    for (const item of this.list.children) {
      $("button", item).setAttribute("aria-pressed", String(Number(item.dataset.result) === result?.id));
    }
    this.root.hidden = this.results.length === 0;
    this.onSelect(result);
  }

  /** Take a result away for good. The one beside it takes its place, and the focus. */
  remove(result) {
    const i = this.results.indexOf(result);
    this.results.splice(i, 1);
    this.#item(result).remove();
    const next = this.results[Math.min(i, this.results.length - 1)] ?? null;
    this.select(next);
    if (result.url !== null) URL.revokeObjectURL(result.url);
    if (next) $("button", this.#item(next)).focus();
    else $("#prompt").focus();
    say("Removed");
  }

  #item(result) {
    return $(`[data-result="${result.id}"]`, this.list);
  }
}
