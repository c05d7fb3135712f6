/** The playground: connects the form, the server, the stage and the gallery. */

import * as api from "./api.js";
import { $, $$, copy, element, say } from "./dom.js";
import { FieldError, Form } from "./form.js";
import { Gallery, Result, viewOf } from "./gallery.js";
import { Model } from "./model.js";
import { Stage } from "./stage.js";
import { StatusLine } from "./status.js";

const form = new Form($("#form"));
const stage = new Stage($("#stage"));
const gallery = new Gallery($("#gallery"), choose);
const statusLine = new StatusLine((status) => status !== "unreachable" && connect());

let model = null;
let run = null; // AbortController of the generation under way
let restored = false; // whether the results that outlive the page have been looked for

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
  if (!model.loaded || model.kind === null) return;
  form.show(model);
  $("#empty").textContent = model.kind.words.empty;
  $("#kept").textContent = model.kind.words.kept;
  if (hindrance === null && model.kind.kept && !restored) restore();
}

/** Show what the server keeps, and go on with what this tab asked for before it was loaded again. */
async function restore() {
  restored = true;
  try {
    const { done, running } = await model.kind.kept.find();
    for (const event of done) if (!gallery.has(event.remote)) gallery.add(resultOf(event), { select: false });
    if (running === null || run !== null) return;
    const ago = Math.max(0, Date.now() / 1000 - running.created_at);
    follow((signal) => model.kind.kept.resume(running, signal), running, 1, ago);
  } catch (error) {
    restored = false; // the next change of the status, or the key, tries again
    report(error);
  }
}

function generate() {
  if (run !== null) return;
  const request = described();
  if (request === null) return;
  follow((signal) => model.kind.make(request, { model, signal }), request.fields, request.fields.n ?? 1);
}

/** Show the events of a generation until it ends. `begin` gets the signal that ends it early. */
async function follow(begin, fields, count, ago = 0) {
  run = new AbortController();
  showRunning(true);
  stage.begin(model.kind.shape({ size: fields.size ?? "auto" }), count, ago);
  const { one, many } = model.kind.words;
  const made = [];
  try {
    for await (const event of begin(run.signal)) {
      if (event.kind === "progress") stage.progress(event);
      else if (event.kind === "preview") stage.preview(event.index, event.blob);
      else made.push(event);
    }
  } catch (error) {
    if (error.name === "AbortError") say("Cancelled");
    else report(error);
  } finally {
    const took = ["Took", `${stage.end().toFixed(1)} s`];
    const results = made.map((event) => resultOf({ ...event, facts: [...event.facts, ...(event.remote ? [] : [took])] }));
    for (const result of results.reverse()) gallery.add(result); // so that the first stands first, and is shown
    if (made.length) say(made.length === 1 ? `The ${one} is ready` : `${made.length} ${many} are ready`);
    run = null;
    showRunning(false);
    statusLine.ask();
  }
}

/** A result of an event, with all there is to say of it. */
function resultOf(event) {
  const fields = event.request?.fields ?? event.fields;
  const files = Object.values(event.request?.files ?? {}).flat();
  const facts = [
    ...Object.entries(fields).filter(([name]) => !model.kind.told.includes(name)).map(([name, value]) => [form.title(name), value]),
    ["Input", files.map((file) => file.name).join(", ")],
    ...event.facts,
  ];
  return new Result(model.can.modality, { ...event, facts });
}

/** Put a result on the stage, and get its file if it is still to be got. */
async function choose(result) {
  stage.show(result, actionsOf);
  if (result === null || result.url !== null) return;
  try {
    await result.load();
  } catch (error) {
    if (gallery.selected === result) stage.refresh(element("p", { className: "hint waiting" }, "The file did not come."));
    report(error);
    return;
  }
  gallery.refresh(result);
  if (gallery.selected === result) stage.refresh(viewOf(result));
}

/** What can be done with a result: [words, act, class]. */
function actionsOf(result) {
  const withFile = (act) => async () => {
    if (result.url === null) await choose(result);
    if (result.url !== null) act();
  };
  const save = () => Object.assign(document.createElement("a"), { href: result.url, download: result.name }).click();
  const again = () => {
    form.load(result.request);
    $("#prompt").focus();
    say("The form has the settings of this result");
  };
  const use = () => form.pickerOf(result.type)?.add([new File([result.blob], result.name, { type: result.type })]);
  const known = result.request !== null;
  return [
    known && ["Use these settings", again, "soft"],
    ["Download", withFile(save)],
    form.pickerOf(result.type) && ["Use as input", withFile(use)],
    known && ["Copy as curl", (button) => copyAs("curl", result.request, button)],
    known && ["Copy as Python", (button) => copyAs("python", result.request, button)],
    result.remote === null ? ["Remove", () => gallery.remove(result), "quiet"] : ["Delete", () => removeKept(result), "quiet"],
  ].filter(Boolean);
}

/** Delete a result that the server keeps. */
async function removeKept(result) {
  const { ask, remove } = model.kind.kept;
  if (!confirm(ask)) return;
  try {
    await remove(result.remote);
  } catch (error) {
    report(error);
    return;
  }
  gallery.remove(result);
}

function copyAs(language, request, button) {
  copy(model.kind[language](request, api.apiUrl, api.key.get() !== null), button);
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
  restored = false; // what ended for want of a key goes on
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
