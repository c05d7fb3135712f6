/** Pictures: POST /v1/images/generations and /v1/images/edits, as streams. */

import { ApiError, call, post } from "./api.js";
import { element } from "./dom.js";
import { fromJson, literal, requestOfOne, toJson } from "./request.js";
import { credentials, fileWord, KEY_VARIABLE, shell } from "./snippets.js";
import { events } from "./sse.js";

export const words = {
  one: "picture",
  many: "pictures",
  placeholder: "Describe the picture",
  avoided: "What it should not show",
  empty: "Your pictures appear here.",
  kept: "Kept in this tab only: reloading the page empties it.",
};
export const told = ["model", "size", "seed", "n"];
export const sizes = [
  ["Square", [[256, 256], [512, 512], [768, 768], [1024, 1024]]],
  ["Landscape", [[768, 512], [1024, 768], [1216, 832], [1344, 768]]],
  ["Portrait", [[512, 768], [768, 1024], [832, 1216], [768, 1344]]],
];

const FIELDS = ["negative_prompt", "num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "strength"];
const MOST_PREVIEWS = 3; // what OpenAI's API allows
// What pipelines call the arguments that a request's pictures and its mask go into; the first that there is.
const PICTURES = ["image", "images", "input_images", "reference_images"];
const MASKS = ["mask_image", "mask"];

export function takes(field, model) {
  if (field === "size") return model.can.picture_sized || model.sized;
  if (field === "n") return model.limits.max_num_outputs > 1;
  return ["prompt", "seed"].includes(field) || (FIELDS.includes(field) && model.fields.has(field));
}

export function inputs({ can }) {
  const among = (names) => names.find((name) => name in can.media);
  const [picture, mask] = [among(PICTURES), among(MASKS)];
  const most = can.media[picture];
  const found = [];
  if (picture) {
    const title = most > 1 ? `Input pictures (up to ${most})` : "Input picture";
    found.push({ name: "image", argument: picture, title, accept: "image/*", most, hint: "Choose, drop or paste" });
  }
  if (mask) {
    const hint = "White or transparent parts are made anew";
    found.push({ name: "mask", argument: mask, title: "Mask", accept: "image/*", most: 1, hint });
  }
  return found.map(({ argument, ...input }) => ({ ...input, argument, needed: can.required.includes(argument) }));
}

export function shape({ size = "auto" }) {
  if (size === "auto") return { ratio: 1, width: null };
  const [width, height] = size.split("x").map(Number);
  return { ratio: width / height, width };
}

export async function* make(request, { model, signal }) {
  const previews = model.can.previews ? MOST_PREVIEWS : 0;
  let response;
  try {
    response = await send(request, previews, signal);
  } catch (error) {
    if (!(previews > 0 && error.param === "partial_images")) throw error;
    response = await send(request, 0, signal); // this model can do it without
  }
  let count = 0;
  for await (const { data } of events(response.body)) {
    const event = fromJson(data);
    if (event.error) throw new ApiError(response.status, event.error);
    const type = event.type.split(".").at(-1);
    if (type === "progress") yield progress(event);
    if (type === "partial_image") yield { kind: "preview", index: event.index, blob: blobOf(event) };
    if (type === "completed") yield result(request, event);
    if (type === "completed") count += 1;
  }
  if (count === 0) throw new ApiError(response.status, { message: "The server ended its answer before there was a picture." });
}

export const view = (made) => element("img", { src: made.url, alt: `Picture of: ${made.prompt}`, className: "picture" });
export const thumbnail = (made) => element("img", { src: made.url, alt: "", loading: "lazy" });

const operation = ({ files }) => (files.image?.length ? "edits" : "generations");

function send(request, previews, signal) {
  const streaming = { stream: true, stream_progress: true, ...(previews > 0 && { partial_images: previews }) };
  const sent = { ...request, fields: { ...request.fields, ...streaming } };
  const path = `v1/images/${operation(request)}`;
  if (operation(request) === "generations") return post(path, toJson(sent.fields), signal);
  return call(path, { method: "POST", body: toForm(sent), signal });
}

function toForm(request) {
  const form = new FormData();
  for (const [name, value] of Object.entries(request.fields)) form.append(name, String(value));
  for (const [name, file] of filesOf(request)) form.append(name, file);
  return form;
}

/** [name in the form, File]: one picture is `image`, several are `image[]`. */
function filesOf({ files: { image, mask = [] } }) {
  const name = image.length === 1 ? "image" : "image[]";
  return [...image.map((file) => [name, file]), ...mask.map((file) => ["mask", file])];
}

const PHASES = { queued: "Waiting for its turn", encode: "Encoding", denoise: "Denoising", decode: "Decoding" };

function progress({ phase, step, total_steps: total }) {
  const said = PHASES[phase] ?? phase;
  if (phase !== "denoise" || !(total > 0)) return { kind: "progress", phase, words: said };
  return { kind: "progress", phase, words: `${said}: step ${step} of ${total}`, value: step, max: total };
}

function result(request, event) {
  const { seed } = event; // null where several pictures have one seed: then the whole request gives them again
  const again = requestOfOne(request, seed);
  const facts = [["Size", event.size.replace("x", " × ")], ["Seed", again.fields.seed]];
  return { kind: "result", blob: blobOf(event), extension: event.output_format, seed, request: again, facts };
}

function blobOf({ b64_json: data, output_format: format }) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: `image/${format}` });
}

const SAVE = `import base64, json, sys
answer = json.load(sys.stdin)
for i, picture in enumerate(answer.get("data") or sys.exit(answer["error"]["message"])):
    open(f"picture-{i}.png", "wb").write(base64.b64decode(picture["b64_json"]))`;

export function curl(request, url, hasKey) {
  const parts = [`curl -sS ${shell(url(`v1/images/${operation(request)}`))}`, ...credentials(hasKey)];
  if (operation(request) === "edits") {
    for (const [name, value] of Object.entries(request.fields)) parts.push(`--form-string ${shell(`${name}=${value}`)}`);
    for (const [name, file] of filesOf(request)) parts.push(`-F ${shell(`${name}=@${fileWord(file)}`)}`);
  } else {
    parts.push(`-H 'Content-Type: application/json'`, `-d ${shell(toJson(request.fields))}`);
  }
  return `${parts.join(" \\\n  ")} \\\n| python3 -c '${SAVE}'\n`;
}

// Arguments that the client's methods have; the others go into extra_body.
const KNOWN = new Set(["model", "prompt", "n", "size"]);

/** A program for OpenAI's client. */
export function python(request, url, hasKey) {
  const edits = operation(request) === "edits";
  const fields = Object.entries(request.fields);
  const known = fields.filter(([name]) => KNOWN.has(name)).map(([name, value]) => [name, literal(value)]);
  const extra = fields.filter(([name]) => !KNOWN.has(name));
  if (extra.length) known.push(["extra_body", toJson(Object.fromEntries(extra))]);
  if (edits) known.unshift(...openedFiles(request.files));
  const apiKey = hasKey ? `os.environ["${KEY_VARIABLE}"]` : `"none"`;
  return `import base64
${hasKey ? "import os\n" : ""}
from openai import OpenAI

client = OpenAI(base_url=${literal(url("v1"))}, api_key=${apiKey})
answer = client.images.${edits ? "edit" : "generate"}(
${known.map(([name, value]) => `    ${name}=${value},\n`).join("")})
for i, picture in enumerate(answer.data):
    with open(f"picture-{i}.png", "wb") as file:
        file.write(base64.b64decode(picture.b64_json))
`;
}

function* openedFiles({ image, mask = [] }) {
  const open = (file) => `open(${literal(file.name)}, "rb")`;
  yield ["image", image.length === 1 ? open(image[0]) : `[${image.map(open).join(", ")}]`];
  if (mask.length) yield ["mask", open(mask[0])];
}
