/**
 * A request, as the page holds it, and its two forms on the wire.
 *
 * {operation: "generations" | "edits", fields: {name: value}, images: [File], mask: File | null}
 * A seed is a BigInt; other values are what JSON has.
 */

export function makeRequest(fields, images, mask) {
  return { operation: images.length ? "edits" : "generations", fields, images, mask };
}

/** The request that gives one picture of an answer again. */
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

/** The name under which the pictures go: one is `image`, several are `image[]`. */
export function imageField(request) {
  return request.images.length === 1 ? "image" : "image[]";
}

export function toForm({ fields, images, mask }) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, String(value));
  for (const image of images) form.append(imageField({ images }), image);
  if (mask !== null) form.append("mask", mask);
  return form;
}
