/** This session's results. A result has a kind; what is different between kinds is in KINDS. */

import { $, element, say } from "./dom.js";

const KINDS = {
  image: {
    thumbnail: (result) => element("img", { src: result.url, alt: "", loading: "lazy" }),
    view: (result) => element("img", { src: result.url, alt: `Picture of: ${result.prompt}`, className: "picture" }),
  },
};

export const viewOf = (result) => KINDS[result.kind].view(result);

let count = 0;

/** A result: its file, and how it came to be. `facts` are pairs of words to show. */
export function makeResult({ kind, blob, request, seed, facts }) {
  count += 1;
  const extension = blob.type.split("/")[1];
  return {
    id: count,
    kind,
    blob,
    url: URL.createObjectURL(blob),
    name: `polymux-${count}${seed === null ? "" : `-seed-${seed}`}.${extension}`,
    prompt: request.fields.prompt,
    request,
    facts,
  };
}

export class Gallery {
  /** `onSelect` is called with the result that was chosen, or with null when there is none any more. */
  constructor(root, onSelect) {
    this.root = root;
    this.list = $("ul", root);
    this.onSelect = onSelect;
    this.results = []; // newest first
  }

  add(result) {
    this.results.unshift(result);
    const title = `Result ${result.id}: ${result.prompt}`;
    const button = element(
      "button",
      { type: "button", title: result.prompt, attributes: { "aria-label": title }, onclick: () => this.select(result) },
      KINDS[result.kind].thumbnail(result),
    );
    this.list.prepend(element("li", { data: { result: result.id } }, button));
    this.select(result);
  }

  select(result) {
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
    URL.revokeObjectURL(result.url);
    if (next) $("button", this.#item(next)).focus();
    else $("#prompt").focus();
    say("Removed");
  }

  #item(result) {
    return $(`[data-result="${result.id}"]`, this.list);
  }
}
