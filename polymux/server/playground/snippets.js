/** What the commands of several kinds have in common. All of them run as they are. */

import { literal, toJson } from "./request.js";

export const KEY_VARIABLE = "POLYMUX_API_KEY"; // the key itself is not written down

/** curl's words that bring the key. */
export const credentials = (hasKey) => (hasKey ? [`-H "Authorization: Bearer $${KEY_VARIABLE}"`] : []);

/** One word for a POSIX shell. */
export function shell(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

/** A file's name as curl's -F takes it; in quotes, where ; and , mean nothing. */
export function fileWord(file) {
  return `"${file.name.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`;
}

/** A command that posts JSON to `address` and keeps the answer as `file`. */
export function curlToFile(request, address, file, hasKey) {
  const media = hasFiles(request);
  const parts = [
    `curl -sS --fail-with-body ${shell(address)}`,
    ...credentials(hasKey),
    "-H 'Content-Type: application/json'",
    media ? "--data-binary @-" : `-d ${shell(toJson(request.fields))}`,
    `-o ${file} || { cat ${file} >&2; rm -f ${file}; false; }`, // then the answer says what is wrong
  ];
  const body = media ? `python3 -c ${shell(`import base64, json\n${URL_OF}print(json.dumps(${bodyOf(request)}))`)} \\\n| ` : "";
  return `${body}${parts.join(" \\\n  ")}\n`;
}

/** The same as a program that needs Python alone. */
export function pythonToFile(request, address, file, hasKey) {
  const media = hasFiles(request);
  const headers = `{"Content-Type": "application/json"${hasKey ? `, "Authorization": f"Bearer {os.environ['${KEY_VARIABLE}']}"` : ""}}`;
  const modules = [media && "base64", "json", hasKey && "os", "shutil", "urllib.error", "urllib.request"].filter(Boolean);
  return `${modules.map((name) => `import ${name}\n`).join("")}
${media ? `\n${URL_OF}\n\n` : ""}body = ${bodyOf(request)}
request = urllib.request.Request(${literal(address)}, json.dumps(body).encode(), ${headers})
try:
    with urllib.request.urlopen(request) as answer, open("${file}", "wb") as file:
        shutil.copyfileobj(answer, file)
except urllib.error.HTTPError as error:
    raise SystemExit(error.read().decode())
`;
}

const URL_OF = `def url_of(name):
    with open(name, "rb") as file:
        return "data:;base64," + base64.b64encode(file.read()).decode()
`;

const hasFiles = ({ files }) => Object.values(files).some((some) => some.length > 0);

/** The body as a dictionary of Python, whose words for text and numbers are those of JSON. Fields are never false or null. */
function bodyOf({ fields, files }) {
  const given = Object.entries(files).filter(([, some]) => some.length > 0);
  const media = given.map(([name, some]) => `${literal(name)}: [${some.map((file) => `url_of(${literal(file.name)})`).join(", ")}]`);
  const all = Object.entries(fields).map(([name, value]) => `${literal(name)}: ${value === true ? "True" : literal(value)}`);
  if (media.length) all.push(`"media": {${media.join(", ")}}`);
  return `{${all.join(", ")}}`;
}
