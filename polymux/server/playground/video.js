/** Videos: jobs of POST /v1/videos, which the server keeps. What this tab asked for survives a reload of the page. */

import { ApiError, call, download, post } from "./api.js";
import { calm, element } from "./dom.js";
import { icon, mediaInputs } from "./media.js";
import { pause } from "./pause.js";
import { fromJson, requestOfOne, toJson, withMedia } from "./request.js";
import { curlToFile, pythonToFile } from "./snippets.js";

export const words = {
  one: "video",
  many: "videos",
  placeholder: "Describe the video",
  avoided: "What it should not show",
  empty: "Your videos appear here.",
  kept: "All videos that the server keeps, until their time is over or somebody deletes them.",
};
export const told = [
  "model", "size", "seconds", "num_frames", "fps", "seed", "output_format", "enable_frame_interpolation", "frame_interpolation_exp",
];
export const sizes = [
  ["Landscape", [[480, 320], [704, 480], [832, 480], [1280, 704], [1280, 720]]],
  ["Portrait", [[320, 480], [480, 704], [480, 832], [704, 1280], [720, 1280]]],
  ["Square", [[256, 256], [512, 512], [768, 768]]],
];

const FIELDS = ["negative_prompt", "num_inference_steps", "guidance_scale", "guidance_scale_2", "true_cfg_scale", "strength"];

export function takes(field, model) {
  if (field === "size") return model.sized;
  if (field === "seconds" || field === "num_frames") return model.fields.has("num_frames");
  if (field === "frame_interpolation_exp") return model.can.frame_interpolation;
  return ["prompt", "seed", "fps", "output_format"].includes(field) || (FIELDS.includes(field) && model.fields.has(field));
}

export const inputs = mediaInputs;

export function shape({ size = "auto" }) {
  if (size === "auto") return { ratio: 16 / 9, width: null };
  const [width, height] = size.split("x").map(Number);
  return { ratio: width / height, width };
}

export async function* make(request, { signal }) {
  const { prompt, ...others } = await withMedia(request);
  const body = toJson(prompt === "" ? others : { prompt, ...others }); // for models that work without one
  const job = await jobOf(post("v1/videos", body)); // without `signal`: once sent, a job is ended by its id alone
  requests.keep(job.id, request);
  yield* follow(job, request, signal);
}

/** What outlives the page: results of jobs, and those under way. */
export const kept = {
  /** {done: results, oldest first, running: the youngest job of this tab that goes on, or null} */
  async find() {
    const { data } = fromJson(await (await call("v1/videos?limit=50")).text());
    const done = data.filter((job) => job.status === "completed").map((job) => result(job, requests.of(job.id)));
    const running = data.find((job) => !ended(job) && requests.of(job.id) !== null) ?? null;
    return { done: done.reverse(), running };
  },
  /** Yields the events of a job that `find` found. */
  resume: (job, signal) => follow(job, requests.of(job.id), signal),
  ask: "Delete this video from the server?",
  /** Delete it from the server. */
  remove: (id) => remove(id),
};

async function* follow(job, request, signal) {
  try {
    for await (const state of states(job, signal)) {
      yield progress(state);
      if (state.status === "failed") throw new ApiError(500, state.error);
      if (state.status === "completed") yield result(state, request);
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    yield { kind: "progress", phase: "cancel", words: "Cancelling" };
    await remove(job.id);
    throw error;
  }
}

const FIRST_MS = 1000;
const MOST_MS = 10_000;
const PASSING = [0, 429, 502, 503, 504]; // after these it is worth asking again

/** The job, again and again until it has ended: less often while nothing changes, and not while nobody looks. */
async function* states(job, signal) {
  let wait = FIRST_MS;
  for (;;) {
    yield job;
    if (ended(job)) return;
    await pause(wait, signal);
    try {
      const next = await jobOf(call(`v1/videos/${job.id}`, { signal }));
      const changed = next.status !== job.status || next.progress !== job.progress;
      wait = changed ? FIRST_MS : Math.min(wait * 1.5, MOST_MS);
      job = next;
    } catch (error) {
      if (!PASSING.includes(error.status)) throw error;
      wait = Math.max(Math.min(wait * 2, MOST_MS), 1000 * error.retryAfter);
      job = { ...job, trouble: error.message };
    }
  }
}

const ended = (job) => ["completed", "failed"].includes(job.status);

async function jobOf(answer) {
  return fromJson(await (await answer).text());
}

async function remove(id) {
  try {
    await call(`v1/videos/${id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) throw error; // it is gone already
  }
  requests.forget(id);
}

function progress({ status, progress: percent, trouble }) {
  if (trouble) return { kind: "progress", phase: "trouble", words: `${trouble} Asking again` };
  if (status === "queued") return { kind: "progress", phase: "queued", words: "Waiting for its turn" };
  const phase = percent < 1 ? "Starting" : percent < 85 ? "Denoising" : percent < 90 ? "Decoding" : "Writing the file";
  return { kind: "progress", phase, words: `${phase}: ${percent} %`, value: percent, max: 100 };
}

/** `request` is null where this tab doesn't know it, or no longer has its files. */
function result(job, request) {
  const whole = request?.whole === false ? null : request;
  const between = request?.fields.frame_interpolation_exp;
  const until = job.expires_at === null ? "" : new Date(job.expires_at * 1000).toLocaleString();
  return {
    kind: "result",
    blob: null,
    type: TYPES[job.output_format],
    load: async () => (await download(`v1/videos/${job.id}/content`)).blob,
    remote: job.id,
    extension: job.output_format,
    seed: job.seed,
    prompt: job.prompt ?? "",
    request: whole && requestOfOne(whole, job.seed),
    fields: request?.fields ?? { ...(job.prompt && { prompt: job.prompt }) },
    facts: [
      ["Size", job.size?.replace("x", " × ")],
      ["Length", job.seconds && `${job.seconds} s: ${job.num_frames} frames, ${job.fps} per second`],
      ["In between", between && `${2 ** between - 1} frames`],
      ["Format", job.output_format],
      ["Seed", job.seed],
      ["Made", new Date(job.created_at * 1000).toLocaleString()],
      ["Took", job.completed_at && `${job.completed_at - job.created_at} s`],
      ["Kept until", until],
    ],
  };
}

/** The requests of this tab's jobs, by their id. Files are not kept: a request that had some is not whole. */
const requests = {
  name: "polymux-videos",
  most: 50,
  all: () => JSON.parse(sessionStorage.getItem(requests.name) ?? "{}"),
  keep(id, { fields, files }) {
    const whole = Object.values(files).every((some) => some.length === 0);
    const entries = [...Object.entries(requests.all()), [id, { whole, fields: toJson(fields) }]];
    sessionStorage.setItem(requests.name, JSON.stringify(Object.fromEntries(entries.slice(-requests.most))));
  },
  forget(id) {
    const { [id]: _, ...others } = requests.all();
    sessionStorage.setItem(requests.name, JSON.stringify(others));
  },
  of(id) {
    const found = requests.all()[id];
    if (found === undefined) return null;
    const { seed, ...fields } = fromJson(found.fields);
    return { whole: found.whole, fields: { ...fields, ...(seed !== undefined && { seed: BigInt(seed) }) }, files: {} };
  },
};

export function view(made) {
  const label = { "aria-label": `Video of: ${made.prompt}` };
  if (made.type.startsWith("image/")) return element("img", { src: made.url, alt: `Video of: ${made.prompt}`, className: "picture" });
  const moving = { controls: true, loop: true, muted: true, playsInline: true, autoplay: !calm() };
  return element("video", { ...moving, src: made.url, className: "picture", attributes: label });
}

export function thumbnail(made) {
  if (made.url === null) return icon("film");
  if (made.type.startsWith("image/")) return element("img", { src: made.url, alt: "" });
  return element("video", { src: made.url, muted: true, preload: "auto", playsInline: true, attributes: { "aria-hidden": "true" } });
}

const TYPES = { mp4: "video/mp4", webm: "video/webm", gif: "image/gif", webp: "image/webp" };
const fileOf = ({ fields }) => `video.${fields.output_format ?? "mp4"}`;

export const curl = (request, url, hasKey) => curlToFile(request, url("v1/videos/sync"), fileOf(request), hasKey);
export const python = (request, url, hasKey) => pythonToFile(request, url("v1/videos/sync"), fileOf(request), hasKey);
