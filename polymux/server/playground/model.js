/** What the served model takes: a reading of one entry of GET /v1/models. The form offers this and nothing else. */

import { KINDS } from "./kinds.js";

export class Model {
  constructor(entry) {
    this.id = entry.id;
    this.limits = entry.limits;
    this.can = entry.capabilities; // null until the model is loaded
    this.fields = new Set(this.can?.fields);
    this.kind = KINDS[this.can?.modality] ?? null;
    this.inputs = this.kind?.inputs(this) ?? [];
  }

  get loaded() {
    return this.can !== null;
  }

  /** Why the page cannot use this model, or null. */
  get hindrance() {
    if (this.kind === null) return `This model makes ${this.can.modality}; the playground shows pictures, videos and sound so far.`;
    const known = ["width", "height", ...this.inputs.map((input) => input.argument)];
    const missing = this.can.required.filter((name) => !known.includes(name) && !this.takes(name));
    if (missing.length) return `This model needs ${missing.join(", ")}, which the playground does not offer.`;
    return null;
  }

  /** Whether it can be told a size. */
  get sized() {
    return this.fields.has("width") && this.fields.has("height");
  }

  takes(field) {
    return this.inputs.some((input) => input.name === field) || this.kind.takes(field, this);
  }

  needs(field) {
    return this.inputs.find((input) => input.name === field)?.needed ?? this.can.required.includes(field);
  }

  /** Sizes to choose from, [title, [[width, height], ...]], each of which the model takes. */
  get presets() {
    const fits = ([width, height]) =>
      width % this.can.size_multiple === 0 &&
      height % this.can.size_multiple === 0 &&
      width * height <= this.limits.max_generated_image_size;
    return this.kind.sizes.map(([title, sizes]) => [title, sizes.filter(fits)]).filter(([, sizes]) => sizes.length);
  }

  /** The longest sound that it makes, in seconds. */
  get longest() {
    return Math.min(this.can.max_seconds ?? Infinity, this.limits.max_audio_seconds);
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
      ...this.#shapes(number),
      ["Steps", `up to ${number.format(limits.max_inference_steps)}`],
      ["Prompt", `up to ${number.format(limits.max_prompt_length)} characters`],
      ["Without effect", refused.join("; ")],
    ];
  }

  /** What its results may be. */
  #shapes(number) {
    const { can, limits } = this;
    const size = ["Sizes", can && `multiples of ${can.size_multiple}, up to ${number.format(limits.max_generated_image_size)} pixels`];
    switch (can?.modality) {
      case "image":
        return [size, ["Pictures at once", `up to ${limits.max_num_outputs}`], ["Previews", can.previews ? "yes" : "no"]];
      case "video":
        return [size, ["Frames", `up to ${number.format(limits.max_num_frames)}`], ["Per second", can.fps]];
      case "audio":
        return [["Length", `up to ${number.format(this.longest)} s`], ["Rate", can.sample_rate && `${number.format(can.sample_rate)} Hz`]];
      default:
        return [];
    }
  }
}
