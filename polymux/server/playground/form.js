/** The form: shows what the model takes, becomes a request, and shows what is wrong beside the field it is about. */

import { $, $$, element } from "./dom.js";
import { Picker, listen } from "./pickers.js";

const TEXTS = ["prompt", "negative_prompt", "output_format", "response_format"];
const NUMBERS = [
  "seconds", "num_frames", "fps", "frame_interpolation_exp", "num_inference_steps", "n", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "strength",
];
const WHOLE = ["num_frames", "num_inference_steps", "n", "width", "height"];
const EITHER = ["seconds", "num_frames"]; // one says what the other would
// Names of fields in the server's errors that are parts or other names of ours.
const ALIASES = { width: "size", height: "size", enable_frame_interpolation: "frame_interpolation_exp" };

/** The server's words start with the field's name and value, for those who do not see the field. */
function besideField(param, message) {
  const named = message.startsWith(`${param}=`) || message.startsWith(`media.`);
  const words = named ? message.replace(/^[^:]*: /, "") : message;
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
    this.pickers = [];
    listen(() => this.pickers);
    $("#size").addEventListener("change", () => this.#showCustomSize());
    $("#random-seed").addEventListener("click", () => {
      $("#seed").value = "";
      this.#clear("seed");
    });
    root.addEventListener("input", (event) => this.#clear(event.target.closest(".field")?.dataset.field));
    for (const [i, name] of EITHER.entries()) {
      const other = EITHER[1 - i];
      $(`#${name}`).addEventListener("input", () => {
        if ($(`#${name}`).value === "") return;
        $(`#${other}`).value = "";
        this.#clear(other);
      });
    }
  }

  /** Offer what `model` takes. */
  show(model) {
    this.model = model;
    const { can, limits } = model;
    this.#offerFiles();
    $("#prompt").placeholder = model.kind.words.placeholder;
    $("#negative_prompt").placeholder = model.kind.words.avoided;
    this.#limit("num_inference_steps", 1, limits.max_inference_steps);
    this.#limit("n", 1, limits.max_num_outputs);
    for (const id of ["width", "height"]) this.#limit(id, can.size_multiple, null, can.size_multiple);
    this.#limit("num_frames", 1, limits.max_num_frames, can.frames_multiple);
    this.#limit("seconds", 0, can.modality === "audio" ? model.longest : null, "any");
    $("#fps").placeholder = can.fps ?? "needed";
    $("#num_frames-hint").hidden = !(can.frames_multiple > 1);
    $("#num_frames-hint").textContent = `1 more than a multiple of\u00a0${can.frames_multiple}`;
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
    if (this.#offered("fps") && this.model.can.fps === null && fields.fps === undefined) {
      throw new FieldError("fps", "Say how many frames per second: what the model is made for is not known.");
    }
    if (fields.frame_interpolation_exp !== undefined) fields.enable_frame_interpolation = true;
    const seed = $("#seed").value.trim();
    if (seed !== "" && !/^\d{1,20}$/.test(seed)) throw new FieldError("seed", "A whole number from 0; empty draws one.");
    if (seed !== "") fields.seed = BigInt(seed);
    return { fields, files: this.#files() };
  }

  /** Fill the form from a request that was made before. */
  load({ fields, files }) {
    for (const name of [...TEXTS, ...NUMBERS, "seed"]) $(`#${name}`).value = fields[name] ?? (name === "n" ? 1 : "");
    for (const picker of this.pickers) picker.set(files[picker.name] ?? []);
    const sizes = $$("option", $("#size")).map((option) => option.value);
    const size = fields.size ?? "auto";
    $("#size").value = sizes.includes(size) ? size : "custom";
    if (!sizes.includes(size)) [$("#width").value, $("#height").value] = size.split("x");
    this.#showCustomSize();
    this.clear();
  }

  /** Whether there is a place for what is wrong with `param`; if so it is shown there. */
  fail(param, message) {
    const name = param?.replace(/^media\./, "").replace(/\W.*$/, "") ?? "";
    const input = this.model?.inputs.find(({ argument }) => argument === name);
    const field = this.#field(ALIASES[name] ?? input?.name ?? name);
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

  /** Where a file of this type can go; undefined if nowhere. */
  pickerOf(type) {
    return this.pickers.find((picker) => picker.takes(type));
  }

  /** What the page calls a field. */
  title(name) {
    const label = $(`label[for="${CSS.escape(name)}"]`, this.root);
    return label === null ? name : $(".text", label)?.textContent ?? label.textContent;
  }

  /** A picker for each of the model's inputs; what was chosen stays if they are the same as before. */
  #offerFiles() {
    const offered = JSON.stringify(this.model.inputs);
    if (offered === this.offered) return;
    this.offered = offered;
    this.pickers = this.model.inputs.map((input) => {
      const changed = () => {
        this.#clear(input.name);
        this.#offer();
      };
      return new Picker(input, changed, (why) => this.fail(input.name, why));
    });
    $("#inputs").replaceChildren(...this.pickers.map((picker) => picker.root));
  }

  /** The chosen files by the name of their input. Raises FieldError. */
  #files() {
    const offered = this.pickers.filter((picker) => !picker.root.hidden);
    const missing = offered.find((picker) => picker.needed && picker.files.length === 0);
    if (missing) throw new FieldError(missing.name, "Choose a file first: the model needs one.");
    return Object.fromEntries(offered.map((picker) => [picker.name, picker.files]));
  }

  #field(name) {
    return $(`[data-field="${CSS.escape(name)}"]`, this.root);
  }

  #offered(name) {
    return !this.#field(name).hidden;
  }

  #offer() {
    if (this.model === null) return;
    const withFile = this.pickers.some((picker) => picker.name !== "mask" && picker.files.length > 0);
    const needsFile = this.model.inputs.some((input) => input.needed);
    for (const field of $$("[data-field]", this.root)) {
      const name = field.dataset.field;
      // Strength and mask say something about another input; without one they would have no effect.
      const waits = ["strength", "mask"].includes(name) && !withFile && !needsFile;
      field.hidden = !this.model.takes(name) || waits;
    }
    const auto = $('#size option[value="auto"]');
    const follows = withFile && this.model.can.modality === "image";
    if (auto) auto.textContent = follows ? "Auto: as the input picture" : "Auto: the model's own";
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

  #limit(id, min, max, step = 1) {
    Object.assign($(`#${id}`), { min, step, max: max ?? "" });
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
    if (input.value === "") return null;
    if (WHOLE.includes(id) && !Number.isInteger(Number(input.value))) throw new FieldError(id, "A whole number.");
    return Number(input.value);
  }
}
