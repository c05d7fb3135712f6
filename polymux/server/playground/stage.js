/** The large place: what is being made, with progress and previews, or the result that was chosen. */

import { $, calm, describe, element, say } from "./dom.js";
import { viewOf } from "./gallery.js";

const SPOKEN_MS = 8000; // how often the steps are told to those who listen

export class Stage {
  constructor(root) {
    this.root = root;
    this.timer = null; // while something is being made
    this.shown = null; // the result on the stage, if any
    this.picked = false; // whether it was put there while something is being made
  }

  /** `count` results of a shape are being made, and have been for `ago` seconds. */
  begin(shape, count, ago = 0) {
    this.#phase = null;
    this.spoken = performance.now();
    this.started = this.spoken - 1000 * ago;
    const frame = $(".frame", this.root);
    frame.replaceChildren(...Array.from({ length: count }, () => tile(shape)));
    frame.dataset.count = count;
    $("#phase").textContent = "Sent";
    $("#progress").removeAttribute("value");
    this.#tick();
    this.timer = setInterval(() => this.#tick(), 100);
    this.picked = false;
    this.#render();
    this.root.scrollIntoView({ block: "nearest", behavior: calm() ? "auto" : "smooth" });
    say("Generating");
  }

  progress({ phase, words, value = null, max }) {
    $("#phase").textContent = words;
    if (value !== null) Object.assign($("#progress"), { max, value });
    const now = performance.now();
    if (phase !== this.#phase || now - this.spoken > SPOKEN_MS) {
      this.spoken = now;
      say($("#phase").textContent);
    }
    this.#phase = phase;
  }

  /** What picture `i` looks like so far. */
  async preview(i, blob) {
    const place = $(".frame", this.root).children[i];
    if (!place) return;
    const image = element("img", { src: URL.createObjectURL(blob), alt: "Preview", className: "preview" });
    await image.decode().catch(() => {}); // so that nothing flickers
    place.replaceChildren(image);
    URL.revokeObjectURL(image.src);
  }

  /** The generation has ended, well or not. Returns the seconds that it took. */
  end() {
    clearInterval(this.timer);
    this.timer = null;
    this.#render();
    return (performance.now() - this.started) / 1000;
  }

  /** Put a result on the stage, with `actions` to choose from; null empties it. What is being made stays in sight. */
  show(result, actions) {
    this.shown = result;
    this.picked = this.timer !== null;
    const place = $(".result", this.root);
    place.replaceChildren();
    if (result !== null) {
      const list = element("dl");
      describe(list, result.facts);
      const buttons = actions(result).map(([name, act, className = ""]) =>
        element("button", { type: "button", textContent: name, className, onclick: (event) => act(event.currentTarget) }),
      );
      place.append(viewOf(result), element("div", { className: "row tools" }, ...buttons), list);
    }
    this.#render();
  }

  /** The result's file has come, or did not. */
  refresh(view) {
    $(".result > :first-child", this.root)?.replaceWith(view);
  }

  #phase = null;

  #tick() {
    $("#elapsed").textContent = `${((performance.now() - this.started) / 1000).toFixed(1)} s`;
  }

  #render() {
    const running = this.timer !== null;
    $(".running", this.root).hidden = !running;
    $(".result", this.root).hidden = this.shown === null || (running && !this.picked);
    $(".empty", this.root).hidden = this.shown !== null || running;
  }
}

/** A place of the size that the picture will have, as far as that is known and there is room. */
function tile({ ratio, width }) {
  const made = element("div", { className: "tile" });
  made.style.aspectRatio = ratio;
  made.style.width = `min(100%, ${66 * ratio}vh${width === null ? "" : `, ${width}px`})`;
  return made;
}
