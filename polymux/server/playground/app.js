/** The playground: connects the form, the server, the stage and the gallery. */

import * as api from "./api.js";
import { $, $$, copy, say } from "./dom.js";
import { FieldError, Form } from "./form.js";
import { Gallery, makeResult } from "./gallery.js";
import { Model } from "./model.js";
import { requestOfOne } from "./request.js";
import * as snippets from "./snippets.js";
import { Stage } from "./stage.js";
import { StatusLine } from "./status.js";

const form = new Form($("#form"));
const stage = new Stage($("#stage"));
const gallery = new Gallery($("#gallery"), (result) => stage.show(result, actionsOf));
const statusLine = new StatusLine((status) => status !== "unreachable" && connect());

let model = null;
let run = null; // AbortController of the generation under way

/** Ask what is served; offer it. */
async function connect() {
  try {
    const [entry] = await api.models();
    model = new Model(entry);
  } catch (error) {
    report(error);
    return;
  }
  $("#key-form").hidden = true;
  statusLine.show(model);
  const hindrance = model.loaded ? model.hindrance : null;
  $("#notice").textContent = hindrance ?? "";
  $("#notice").hidden = hindrance === null;
  $("#form").toggleAttribute("inert", hindrance !== null);
  if (model.loaded) form.show(model);
}

async function generate() {
  if (run !== null) return;
  const request = described();
  if (request === null) return;
  run = new AbortController();
  showRunning(true);
  stage.begin(request, request.fields.n ?? 1);
  const made = [];
  try {
    for await (const event of api.generate(request, { previews: model.previews, signal: run.signal })) {
      if (event.kind === "progress") stage.progress(event);
      else if (event.kind === "preview") stage.preview(event.index, blobOf(event));
      else made.push(event);
    }
  } catch (error) {
    if (error.name === "AbortError") say("Cancelled");
    else report(error);
  } finally {
    const seconds = stage.end();
    const results = made.map((event) => resultOf(request, event, seconds));
    for (const result of results.reverse()) gallery.add(result); // so that the first stands first, and is shown
    if (made.length) say(made.length === 1 ? "The picture is ready" : `${made.length} pictures are ready`);
    run = null;
    showRunning(false);
    statusLine.ask();
  }
}

/** One picture of an answer, with the request that gives it again. */
function resultOf(request, event, seconds) {
  const { seed } = event; // null where several pictures have one seed: then the whole request gives them again
  const again = requestOfOne(request, seed);
  const facts = [
    ...Object.entries(again.fields).filter(([name]) => !["model", "size", "seed", "n"].includes(name)),
    ["Size", event.size.replace("x", " × ")],
    ["Seed", again.fields.seed],
    ["Input", [...request.images, request.mask].filter(Boolean).map((file) => file.name).join(", ")],
    ["Took", `${seconds.toFixed(1)} s`],
  ].map(([name, value]) => [$(`label[for="${name}"]`)?.textContent ?? name, value]);
  return makeResult({ kind: "image", blob: blobOf(event), request: again, seed, facts });
}

function blobOf({ b64_json: data, output_format: format }) {
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  return new Blob([bytes], { type: `image/${format}` });
}

function actionsOf(result) {
  const actions = [
    ["Use these settings", () => {
      form.load(result.request);
      $("#prompt").focus();
      say("The form has the settings of this result");
    }, "soft"],
    ["Download", () => Object.assign(document.createElement("a"), { href: result.url, download: result.name }).click()],
  ];
  if (model.takes("image")) actions.push(["Use as input", () => form.images.add([new File([result.blob], result.name, { type: result.blob.type })])]);
  return [
    ...actions,
    ["Copy as curl", (button) => copyAs("curl", result.request, button)],
    ["Copy as Python", (button) => copyAs("python", result.request, button)],
    ["Remove", () => gallery.remove(result), "quiet"],
  ];
}

function copyAs(language, request, button) {
  copy(snippets[language](request, api.apiUrl, api.key.get() !== null), button);
}

/** The form's request; null if it says what is wrong. */
function described() {
  form.clear();
  $("#alert").textContent = "";
  if (!model?.loaded) {
    if (model === null) connect(); // says why nothing is known
    else $("#alert").textContent = "The model is not loaded yet.";
    return null;
  }
  try {
    return form.request();
  } catch (error) {
    if (!(error instanceof FieldError)) throw error;
    report(error);
    return null;
  }
}

/** Say what went wrong, beside the field that it is about if there is one. */
function report(error) {
  if (error.status === 401) {
    const wrong = api.key.get() !== null;
    api.key.forget();
    $("#key-form").hidden = false;
    $("#api-key").focus();
    $("#key-error").textContent = wrong ? "The server did not accept this key." : "";
    return;
  }
  const wait = error.retryAfter ? `. Try again in ${error.retryAfter} s.` : "";
  const beside = form.fail(error.param, error.message);
  $("#alert").textContent = beside ? "" : error.message + wait;
  if (beside) say(error.message);
}

function showRunning(running) {
  $("#generate").setAttribute("aria-disabled", String(running));
  $("#generate").textContent = running ? "Generating…" : "Generate";
  if (!running && document.activeElement === $("#cancel")) $("#generate").focus();
  $("#cancel").hidden = !running;
}

$("#form").addEventListener("submit", (event) => {
  event.preventDefault();
  generate();
});
$("#cancel").addEventListener("click", () => run?.abort());
$("#wake").addEventListener("click", async () => {
  try {
    await api.wakeUp();
  } catch (error) {
    report(error);
  }
  statusLine.ask();
});
$("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key.set($("#api-key").value);
  $("#api-key").value = "";
  connect();
});
for (const button of $$("[data-copy]")) {
  button.addEventListener("click", () => {
    const request = described();
    if (request !== null) copyAs(button.dataset.copy, request, button);
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("#form").inert) {
    event.preventDefault();
    generate();
  }
  if (event.key === "Escape" && run !== null && !$("#snippet").open) run.abort();
});

statusLine.ask();
