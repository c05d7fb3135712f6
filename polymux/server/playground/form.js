/** The form: shows what the model takes, becomes a request, and shows what is wrong beside the field it is about. */

import { $, $$, element } from "./dom.js";
import { Picker, listen } from "./pickers.js";
import { makeRequest } from "./request.js";

const TEXTS = ["prompt", "negative_prompt"];
const NUMBERS = ["num_inference_steps", "n", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "strength"];
// Names of fields in the server's errors that are parts or other names of ours.
const ALIASES = { width: "size", height: "size", mask_image: "mask", images: "image" };

/** The server's words start with the field's name and value, for those who do not see the field. */
function besideField(param, message) {
  const words = message.startsWith(`${param}=`) ? message.replace(/^[^:]*: /, "") : message;
  return words[0].toUpperCase() + words.slice(1);
}

/** A value that the page itself cannot send. */
export class FieldError extends Error {
  constructor(param, message) {
    super(message);
    this.param = param;
  }
}

export class Form {
  constructor(root) {
    this.root = root;
    this.model = null;
    this.images = this.#picker("image");
    this.mask = this.#picker("mask");
    listen([this.images, this.mask]);
    $("#size").addEventListener("change", () => this.#showCustomSize());
    $("#random-seed").addEventListener("click", () => {
      $("#seed").value = "";
      this.#clear("seed");
    });
    root.addEventListener("input", (event) => this.#clear(event.target.closest(".field")?.dataset.field));
  }

  /** Offer what `model` takes. */
  show(model) {
    this.model = model;
    this.images.allow(model.images);
    this.mask.allow(model.takes("mask") ? 1 : 0);
    this.#limit($("#num_inference_steps"), 1, model.limits.max_inference_steps);
    this.#limit($("#n"), 1, model.limits.max_num_outputs);
    for (const id of ["width", "height"]) {
      this.#limit($(`#${id}`), model.can.size_multiple, null, model.can.size_multiple);
    }
    const words = model.images > 1 ? `Input pictures (up to ${model.images})` : "Input picture";
    $("label[for=image] .text", this.root).textContent = words + (model.needs("image") ? "" : ", optional");
    $("label[for=mask] .text", this.root).textContent = "Mask" + (model.needs("mask") ? "" : ", optional");
    this.#offerSizes();
    this.#offer();
  }

  /** The request that the form describes. Raises FieldError. */
  request() {
    const fields = { model: this.model.id };
    for (const name of TEXTS) {
      const text = $(`#${name}`).value;
      if (this.#offered(name) && (text !== "" || name === "prompt")) fields[name] = text;
    }
    if (fields.prompt.trim() === "" && this.model.needs("prompt")) throw new FieldError("prompt", "Write a prompt first.");
    const size = this.#offered("size") ? this.#size() : null;
    if (size !== null) fields.size = size;
    for (const name of NUMBERS.filter((name) => this.#offered(name))) {
      const value = this.#number(name);
      if (value !== null && !(name === "n" && value === 1)) fields[name] = value;
    }
    const seed = $("#seed").value.trim();
    if (seed !== "" && !/^\d{1,20}$/.test(seed)) throw new FieldError("seed", "A whole number from 0; empty draws one.");
    if (seed !== "") fields.seed = BigInt(seed);
    if (this.model.needs("image") && this.images.files.length === 0) {
      throw new FieldError("image", "Choose a picture first: this model needs one.");
    }
    return makeRequest(fields, this.images.files, this.images.files.length ? (this.mask.files[0] ?? null) : null);
  }

  /** Fill the form from a request that was made before. */
  load({ fields, images, mask }) {
    for (const name of [...TEXTS, ...NUMBERS, "seed"]) $(`#${name}`).value = fields[name] ?? (name === "n" ? 1 : "");
    this.images.set(images);
    this.mask.set(mask === null ? [] : [mask]);
    const sizes = $$("option", $("#size")).map((option) => option.value);
    const size = fields.size ?? "auto";
    $("#size").value = sizes.includes(size) ? size : "custom";
    if (!sizes.includes(size)) [$("#width").value, $("#height").value] = size.split("x");
    this.#showCustomSize();
    this.clear();
  }

  /** Whether there is a place for what is wrong with `param`; if so it is shown there. */
  fail(param, message) {
    const name = param?.replace(/\W.*$/, "") ?? "";
    const field = this.#field(ALIASES[name] ?? name);
    if (field === null || field.hidden) return false;
    this.#clear(field.dataset.field);
    const id = `${field.dataset.field}-error`;
    field.append(element("p", { id, className: "error", textContent: besideField(param, message) }));
    const inputs = $$("input, textarea, select", field).filter((input) => input.offsetParent !== null);
    for (const input of inputs) {
      input.setAttribute("aria-invalid", "true");
      input.dataset.describedby = input.getAttribute("aria-describedby") ?? "";
      input.setAttribute("aria-describedby", `${id} ${input.dataset.describedby}`.trim());
    }
    (name === "height" ? inputs.at(-1) : inputs[0])?.focus();
    return true;
  }

  clear() {
    for (const field of $$("[data-field]", this.root)) this.#clear(field.dataset.field);
  }

  #clear(name) {
    const field = name === undefined ? null : this.#field(name);
    const error = field && $(".error", field);
    if (!error) return;
    error.remove();
    for (const input of $$("[aria-invalid]", field)) {
      input.removeAttribute("aria-invalid");
      const before = input.dataset.describedby;
      before ? input.setAttribute("aria-describedby", before) : input.removeAttribute("aria-describedby");
    }
  }

  #picker(name) {
    const changed = () => {
      this.#clear(name);
      this.#offer();
    };
    return new Picker(this.#field(name), changed, (why) => this.fail(name, why));
  }

  #field(name) {
    return $(`[data-field="${CSS.escape(name)}"]`, this.root);
  }

  #offered(name) {
    return !this.#field(name).hidden;
  }

  #offer() {
    if (this.model === null) return;
    const withImage = this.images.files.length > 0;
    for (const field of $$("[data-field]", this.root)) {
      const name = field.dataset.field;
      // Strength and mask say something about the input picture; without one they would have no effect.
      const waits = ["strength", "mask"].includes(name) && !withImage && !this.model.needs("image");
      field.hidden = !this.model.takes(name) || waits;
    }
    const auto = $('#size option[value="auto"]');
    if (auto) auto.textContent = withImage ? "Auto: as the input picture" : "Auto: the model's own";
  }

  #offerSizes() {
    const chosen = $("#size").value;
    const option = (value, text) => element("option", { value, textContent: text });
    const groups = this.model.presets.map(([label, sizes]) =>
      element("optgroup", { label }, ...sizes.map(([w, h]) => option(`${w}x${h}`, `${w} × ${h}`))),
    );
    $("#size").replaceChildren(option("auto", "Auto"), ...groups, option("custom", "Other…"));
    if (chosen) $("#size").value = chosen;
    if ($("#size").value === "") $("#size").value = "auto";
    $("#size-hint").textContent = `Width and height are multiples of ${this.model.can.size_multiple}.`;
    this.#showCustomSize();
  }

  #showCustomSize() {
    const custom = $("#size").value === "custom";
    $("#custom-size").hidden = !custom;
    $("#size-hint").hidden = !custom || this.model?.can.size_multiple === 1;
  }

  #limit(input, min, max, step = 1) {
    Object.assign(input, { min, step, ...(max !== null && { max }) });
  }

  #size() {
    const chosen = $("#size").value;
    if (chosen !== "custom") return chosen === "auto" ? null : chosen;
    const [width, height] = [this.#number("width"), this.#number("height")];
    if (width === null || height === null) throw new FieldError("size", "Give both width and height.");
    return `${width}x${height}`;
  }

  #number(id) {
    const input = $(`#${id}`);
    if (input.validity.badInput) throw new FieldError(id, "This is not a number.");
    return input.value === "" ? null : Number(input.value);
  }
}
