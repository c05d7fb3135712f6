/** Sound: POST /v1/audio/generate, which answers with the file. */

import { download } from "./api.js";
import { element } from "./dom.js";
import { icon, mediaInputs } from "./media.js";
import { requestOfOne, toJson, withMedia } from "./request.js";
import { curlToFile, pythonToFile } from "./snippets.js";

export const words = {
  one: "sound",
  many: "sounds",
  placeholder: "Describe the sound",
  avoided: "What it should not sound like",
  empty: "Your sounds appear here.",
  kept: "Kept in this tab only: reloading the page empties it.",
};
export const told = ["model", "seconds", "seed", "response_format"];
export const sizes = [];

const FIELDS = ["negative_prompt", "num_inference_steps", "guidance_scale", "seconds"];

export function takes(field, model) {
  return ["prompt", "seed", "response_format"].includes(field) || (FIELDS.includes(field) && model.fields.has(field));
}

export const inputs = mediaInputs;
export const shape = () => ({ ratio: 8, width: null });

export async function* make(request, { signal }) {
  const body = toJson(await withMedia(request));
  const headers = { "content-type": "application/json" };
  const answer = await download("v1/audio/generate", { method: "POST", body, headers, signal });
  const header = (name) => answer.headers.get(name);
  const seed = header("x-seed");
  const clipped = Number(header("x-clipped-samples"));
  const facts = [
    ["Length", `${Number(header("x-duration")).toFixed(2)} s`],
    ["Rate", `${header("x-sample-rate")} Hz`],
    ["Channels", header("x-channels")],
    ["Beyond full scale", clipped > 0 ? `${clipped} samples` : ""],
    ["Format", extension(request)],
    ["Seed", seed],
  ];
  yield { kind: "result", blob: answer.blob, extension: extension(request), seed, request: requestOfOne(request, seed), facts };
}

export const view = (made) =>
  element("audio", { src: made.url, controls: true, attributes: { "aria-label": `Sound of: ${made.prompt}` } });
export const thumbnail = () => icon("sound");

const extension = ({ fields }) => fields.response_format ?? "wav";
const address = (url) => url("v1/audio/generate");

export const curl = (request, url, hasKey) => curlToFile(request, address(url), `sound.${extension(request)}`, hasKey);
export const python = (request, url, hasKey) => pythonToFile(request, address(url), `sound.${extension(request)}`, hasKey);
