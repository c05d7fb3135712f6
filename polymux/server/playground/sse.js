/** Server-sent events from the body of a response, which EventSource cannot read (it only does GET). */

/** Yields `{event, data}` as they arrive. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = parse(block);
        if (event !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a stream that has failed fails here once more
  }
}

function parse(block) {
  const fields = { event: "message", data: [] };
  for (const line of block.split(/\r?\n/)) {
    const [, name, value] = line.match(/^([a-z]+): ?(.*)$/) ?? [];
    if (name === "event") fields.event = value;
    if (name === "data") fields.data.push(value);
  }
  const data = fields.data.join("\n");
  return data === "" || data === "[DONE]" ? null : { event: fields.event, data };
}
