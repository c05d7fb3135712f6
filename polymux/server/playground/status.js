/** The head of the page: which model is served and whether it works now. Asks again as long as the page is seen. */

import { $, describe, say } from "./dom.js";
import { status } from "./api.js";

const WORDS = {
  ready: "ready",
  loading: "loading",
  asleep: "asleep",
  draining: "shutting down",
  dead: "stopped",
  unreachable: "not reachable",
};
const READY_MS = 10_000;
const OTHER_MS = 2_000;

export class StatusLine {
  /** `onChange` is called with the new status. */
  constructor(onChange) {
    this.onChange = onChange;
    this.now = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => !document.hidden && this.ask());
    const about = $("#about");
    document.addEventListener("click", (event) => about.contains(event.target) || (about.open = false));
    about.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !about.open) return;
      event.stopPropagation(); // it does not cancel what runs
      about.open = false;
      $("summary", about).focus();
    });
  }

  async ask() {
    clearTimeout(this.timer);
    const now = await status();
    clearTimeout(this.timer); // of a question that was asked meanwhile
    if (!document.hidden) this.timer = setTimeout(() => this.ask(), now === "ready" ? READY_MS : OTHER_MS);
    if (now === this.now) return;
    const first = this.now === null;
    this.now = now;
    $("#status").dataset.status = now;
    $("#status").textContent = WORDS[now] ?? now;
    $("#wake").hidden = now !== "asleep";
    if (!first) say(`The model is ${$("#status").textContent}`);
    this.onChange(now);
  }

  show(model) {
    $("#model-name").textContent = model.id;
    document.title = `${model.id} · polymux playground`;
    describe($("#facts"), model.facts);
  }
}
