/** What the served model takes: a reading of one entry of GET /v1/models. The form offers this and nothing else. */

const PRESETS = [
  ["Square", [[256, 256], [512, 512], [768, 768], [1024, 1024]]],
  ["Landscape", [[768, 512], [1024, 768], [1216, 832], [1344, 768]]],
  ["Portrait", [[512, 768], [768, 1024], [832, 1216], [768, 1344]]],
];
const MOST_PREVIEWS = 3; // what OpenAI's API allows

// What pipelines call the arguments that a request's pictures and its mask go into; the first that there is.
const PICTURES = ["image", "images", "input_images", "reference_images"];
const MASKS = ["mask_image", "mask"];

export class Model {
  constructor(entry) {
    this.id = entry.id;
    this.limits = entry.limits;
    this.can = entry.capabilities; // null until the model is loaded
    this.fields = new Set(this.can?.fields);
    const media = this.can?.media ?? {};
    this.argument = { image: PICTURES.find((name) => name in media), mask: MASKS.find((name) => name in media) };
  }

  get loaded() {
    return this.can !== null;
  }

  /** Why the page cannot use this model, or null. */
  get hindrance() {
    if (this.can.modality !== "image") return `This model makes ${this.can.modality}; the playground shows pictures so far.`;
    const known = ["prompt", ...Object.values(this.argument)];
    const missing = this.can.required.filter((name) => !known.includes(name) && !this.fields.has(name));
    if (missing.length) return `This model needs ${missing.join(", ")}, which the playground does not offer.`;
    return null;
  }

  takes(field) {
    if (field === "size") return this.can.picture_sized || (this.fields.has("width") && this.fields.has("height"));
    if (field === "n") return this.limits.max_num_outputs > 1;
    if (field in this.argument) return this.argument[field] !== undefined;
    return field === "prompt" || field === "seed" || this.fields.has(field);
  }

  needs(field) {
    return this.can.required.includes(this.argument[field] ?? field);
  }

  /** How many input pictures a request may bring. */
  get images() {
    return this.can.media[this.argument.image] ?? 0;
  }

  get previews() {
    return this.can.previews ? MOST_PREVIEWS : 0;
  }

  /** Sizes to choose from, [title, [[width, height], ...]], each of which the model takes. */
  get presets() {
    const fits = ([width, height]) =>
      width % this.can.size_multiple === 0 &&
      height % this.can.size_multiple === 0 &&
      width * height <= this.limits.max_generated_image_size;
    return PRESETS.map(([title, sizes]) => [title, sizes.filter(fits)]).filter(([, sizes]) => sizes.length);
  }

  /** What there is to know, as pairs of words. */
  get facts() {
    const number = new Intl.NumberFormat("en");
    const { can, limits } = this;
    const refused = Object.entries(can?.refused ?? {}).map(([name, why]) => `${name}: ${why}`);
    return [
      ["Pipeline", can?.pipeline],
      ["Family", can && (can.family ?? "not declared")],
      ["Parameters", can && number.format(can.parameters)],
      ["Computes in", can?.dtype],
      ["Sizes", can && `multiples of ${can.size_multiple}, up to ${number.format(limits.max_generated_image_size)} pixels`],
      ["Steps", `up to ${number.format(limits.max_inference_steps)}`],
      ["Pictures at once", `up to ${limits.max_num_outputs}`],
      ["Prompt", `up to ${number.format(limits.max_prompt_length)} characters`],
      ["Previews", can && (can.previews ? "yes" : "no")],
      ["Without effect", refused.join("; ")],
    ];
  }
}
