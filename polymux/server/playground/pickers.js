/** Pictures that go into a request: chosen, dropped or pasted; shown; taken away again. */

import { $, element, say } from "./dom.js";

export class Picker {
  /** `root` is the field's element. `onChange` is called when the files are others, `onRefuse` with why one is not taken. */
  constructor(root, onChange, onRefuse) {
    Object.assign(this, { root, onChange, onRefuse });
    this.input = $("input[type=file]", root);
    this.list = $(".chosen", root);
    this.files = [];
    this.most = 0;
    this.input.addEventListener("change", () => {
      this.add([...this.input.files]);
      this.input.value = ""; // so that the same file can be chosen again
    });
  }

  allow(most) {
    this.most = most;
    this.input.multiple = most > 1;
    if (this.files.length > most) this.set(this.files.slice(0, most));
  }

  /** Take those of `files` that are pictures. Where there are too many, the newest stay. */
  add(files) {
    const others = files.filter((file) => !file.type.startsWith("image/"));
    const pictures = files.filter((file) => !others.includes(file));
    if (pictures.length > 0) {
      this.set([...this.files, ...pictures].slice(-this.most));
      say(`${this.files.length} of at most ${this.most} chosen`);
    }
    if (others.length > 0) this.onRefuse(`Not a picture: ${others[0].name}`);
  }

  set(files) {
    this.files = files;
    for (const image of this.list.querySelectorAll("img")) URL.revokeObjectURL(image.src);
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
    const image = element("img", { src: URL.createObjectURL(file), alt: file.name });
    return element("li", { title: file.name }, image, remove);
  }
}

/** Files that are dropped on the page or pasted go to the picker under the pointer, or to the first one. */
export function listen(pickers) {
  const open = () => pickers.filter((picker) => picker.most > 0);
  const at = (target) => open().find((picker) => picker.root.contains(target)) ?? open()[0];
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
    at(event.target)?.add([...event.dataTransfer.files]);
  });
  document.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files];
    if (files.length === 0 || open().length === 0) return;
    event.preventDefault();
    at(event.target).add(files);
  });
}
