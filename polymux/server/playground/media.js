/** What videos and sound have in common: input files by the names of the pipeline's arguments. */

import { $ } from "./dom.js";

const TITLES = { image: "Input picture", video: "Input video", audio: "Input sound", last_image: "Last frame" };

/** All that the pipeline takes; its names say what they hold. */
export function mediaInputs({ can }) {
  return Object.entries(can.media).map(([name, most]) => {
    const title = name === "image" && "last_image" in can.media ? "First frame" : (TITLES[name] ?? titleOf(name));
    const up = most > 1 ? ` (up to ${most})` : "";
    const hint = "Choose, drop or paste";
    return { name, argument: name, title: title + up, accept: acceptOf(name), most, needed: can.required.includes(name), hint };
  });
}

function titleOf(name) {
  const said = name.replace(/^src_/, "source_").replaceAll("_", " ");
  return said[0].toUpperCase() + said.slice(1);
}

/** Which files the server expects in an argument. */
function acceptOf(name) {
  if (name.includes("video")) return "video/*,image/gif";
  if (name.includes("audio")) return "audio/*";
  return name.includes("mask") ? "image/*,video/*" : "image/*";
}

/** A drawing of the page. */
export function icon(name) {
  return $(`#${name}-icon`).content.firstElementChild.cloneNode(true);
}
