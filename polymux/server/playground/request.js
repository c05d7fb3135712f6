/**
 * A request, as the page holds it: {fields: {name: value}, files: {name: [File]}}.
 *
 * A seed is a BigInt, since it has up to 64 bits, more than a JavaScript number holds; other values are what JSON has.
 */

/** The request that gives one result of an answer again. */
export function requestOfOne(request, seed) {
  const { n, ...fields } = request.fields;
  return { ...request, fields: seed === null ? request.fields : { ...fields, seed: BigInt(seed) } };
}

export function literal(value) {
  return typeof value === "bigint" ? String(value) : JSON.stringify(value);
}

export function toJson(fields) {
  return `{${Object.entries(fields).map(([name, value]) => `${JSON.stringify(name)}: ${literal(value)}`).join(", ")}}`;
}

/** JSON whose seeds stay exact: they become text. */
export function fromJson(text) {
  return JSON.parse(text.replace(/"seed":\s*(\d+)/g, '"seed":"$1"'));
}

/** The fields of a body in JSON; its files go as data: URLs. */
export async function withMedia({ fields, files }) {
  const names = Object.keys(files).filter((name) => files[name].length > 0);
  if (names.length === 0) return fields;
  const media = await Promise.all(names.map(async (name) => [name, await Promise.all(files[name].map(dataUrl))]));
  return { ...fields, media: Object.fromEntries(media) };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
