/** A request as a command for a shell, and as a program for OpenAI's Python client. Both run as they are. */

import { imageField, literal, toJson } from "./request.js";

const KEY_VARIABLE = "POLYMUX_API_KEY"; // the key itself is not written down

const SAVE = `import base64, json, sys
answer = json.load(sys.stdin)
for i, picture in enumerate(answer.get("data") or sys.exit(answer["error"]["message"])):
    open(f"picture-{i}.png", "wb").write(base64.b64decode(picture["b64_json"]))`;

export function curl(request, url, hasKey) {
  const words = [`curl -sS ${shell(url(`v1/images/${request.operation}`))}`];
  if (hasKey) words.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  if (request.operation === "edits") {
    for (const [name, value] of Object.entries(request.fields)) words.push(`--form-string ${shell(`${name}=${value}`)}`);
    for (const image of request.images) words.push(`-F ${shell(`${imageField(request)}=@${fileWord(image)}`)}`);
    if (request.mask !== null) words.push(`-F ${shell(`mask=@${fileWord(request.mask)}`)}`);
  } else {
    words.push(`-H 'Content-Type: application/json'`, `-d ${shell(toJson(request.fields))}`);
  }
  return `${words.join(" \\\n  ")} \\\n| python3 -c '${SAVE}'\n`;
}

// Arguments that the client's methods have; the others go into extra_body.
const KNOWN = new Set(["model", "prompt", "n", "size"]);

export function python(request, url, hasKey) {
  const fields = Object.entries(request.fields);
  const files = [...filesOf(request)];
  const known = [...files, ...fields.filter(([name]) => KNOWN.has(name)).map(([name, value]) => [name, literal(value)])];
  const extra = fields.filter(([name]) => !KNOWN.has(name));
  if (extra.length) known.push(["extra_body", toJson(Object.fromEntries(extra))]);
  const apiKey = hasKey ? `os.environ["${KEY_VARIABLE}"]` : `"none"`;
  return `import base64
${hasKey ? "import os\n" : ""}
from openai import OpenAI

client = OpenAI(base_url=${literal(url("v1"))}, api_key=${apiKey})
answer = client.images.${request.operation === "edits" ? "edit" : "generate"}(
${known.map(([name, value]) => `    ${name}=${value},\n`).join("")})
for i, picture in enumerate(answer.data):
    with open(f"picture-{i}.png", "wb") as file:
        file.write(base64.b64decode(picture.b64_json))
`;
}

function* filesOf({ images, mask }) {
  const open = (file) => `open(${literal(file.name)}, "rb")`;
  if (images.length === 1) yield ["image", open(images[0])];
  if (images.length > 1) yield ["image", `[${images.map(open).join(", ")}]`];
  if (mask !== null) yield ["mask", open(mask)];
}

/** One word for a POSIX shell. */
function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A file's name as curl's -F takes it; in quotes, where ; and , mean nothing. */
function fileWord(file) {
  return `"${file.name.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
}
