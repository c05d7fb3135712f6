/** Files that go into a request: chosen, dropped or pasted; shown; taken away again. */

import { $, element, say } from "./dom.js";

const THING = { image: "picture", video: "video", audio: "sound" };

export class Picker {
  /** `input` is one of a kind's inputs. `onChange` is called when the files are others, `onRefuse` with why one is not taken. */
  constructor(input, onChange, onRefuse) {
    Object.assign(this, { ...input, onChange, onRefuse });
    this.list = element("ul", { className: "chosen", attributes: { "aria-label": `Chosen: ${this.title}` } });
    const about = { "aria-describedby": `${this.name}-hint` };
    this.input = element("input", {
      id: this.name,
      type: "file",
      accept: this.accept,
      multiple: this.most > 1,
      attributes: about,
      onchange: () => {
        this.add([...this.input.files]);
        this.input.value = ""; // so that the same file can be chosen again
      },
    });
    this.root = element(
      "div",
      { className: "field wide", data: { field: this.name } },
      element("label", { htmlFor: this.name }, element("span", { className: "text" }, this.title + (this.needed ? "" : ", optional"))),
      element("div", { className: "drop" }, this.input, element("p", { className: "hint", id: `${this.name}-hint` }, this.hint)),
      this.list,
    );
    this.files = [];
  }

  takes(type) {
    return this.accept.split(",").some((some) => (some.endsWith("/*") ? type.startsWith(some.slice(0, -1)) : type === some));
  }

  /** Take those of `files` that are of the right kind. Where there are too many, the newest stay. */
  add(files) {
    const right = files.filter((file) => this.takes(file.type));
    const wrong = files.find((file) => !right.includes(file));
    if (right.length > 0) {
      this.set([...this.files, ...right].slice(-this.most));
      say(`${this.files.length} of at most ${this.most} chosen`);
    }
    if (wrong) this.onRefuse(`Not a ${THING[this.accept.split("/")[0]]}: ${wrong.name}`);
  }

  set(files) {
    this.files = files;
    for (const shown of this.list.querySelectorAll("img, video")) URL.revokeObjectURL(shown.src);
    this.list.replaceChildren(...files.map((file, i) => this.#item(file, i)));
    this.onChange();
  }

  #item(file, i) {
    const remove = element("button", {
      type: "button",
      className: "remove",
      textContent: "×",
      attributes: { "aria-label": `Remove ${file.name}` },
      onclick: () => {
        this.set(this.files.filter((_, other) => other !== i));
        this.input.focus();
      },
    });
    return element("li", { title: file.name }, shown(file), remove);
  }
}

function shown(file) {
  const type = file.type.split("/")[0];
  if (type === "image") return element("img", { src: URL.createObjectURL(file), alt: file.name });
  if (type === "video") {
    return element("video", { src: URL.createObjectURL(file), muted: true, preload: "metadata", attributes: { "aria-label": file.name } });
  }
  return element("span", { className: "name" }, file.name);
}

/** Files that are dropped on the page or pasted go to the picker under the pointer, or to the first one that takes them. */
export function listen(pickers) {
  const open = () => pickers().filter((picker) => !picker.root.hidden);
  const at = (target, files) =>
    open().find((picker) => picker.root.contains(target)) ??
    open().find((picker) => files.some((file) => picker.takes(file.type))) ??
    open()[0];
  const mark = (on) => document.body.classList.toggle("dropping", on);

  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault(); // else the browser would leave the page and open the file
    mark(open().length > 0);
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget === null && mark(false));
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    mark(false);
    const files = [...event.dataTransfer.files];
    at(event.target, files)?.add(files);
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (files.length === 0 || open().length === 0) return;
    event.preventDefault();
    at(event.target, files).add(files);
  });
}
