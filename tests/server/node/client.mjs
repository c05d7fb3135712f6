// One scenario of OpenAI's client for Node.js against a server; prints what it got as JSON.
//     node client.mjs URL SCENARIO
import OpenAI from "openai";

const [url, scenario] = process.argv.slice(2);
const picture = { prompt: "a", size: "64x64", num_inference_steps: 4, seed: 1 };
const client = (options = {}) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, ...options });

async function refused(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: error.constructor.name, status: error.status, param: error.param, code: error.code };
  }
  return {};
}

const scenarios = {
  async generate() {
    const answer = await client().images.generate(picture);
    return { image: answer.data[0].b64_json, seed: answer.seed };
  },
  async stream() {
    const events = [];
    for await (const event of await client().images.generate({ ...picture, stream: true, partial_images: 2 })) {
      events.push({ type: event.type, image: event.b64_json });
    }
    return events;
  },
  async chat() {
    const messages = [{ role: "user", content: "a" }];
    const { prompt, ...fields } = picture;
    const answer = await client().chat.completions.create({ model: "demo", messages, ...fields });
    return { role: answer.choices[0].message.role, parts: answer.choices[0].message.content.map((part) => part.type) };
  },
  async errors() {
    return [
      await refused(client().images.generate({ ...picture, size: "65x64" })),
      await refused(client().images.generate({ ...picture, model: "other" })),
      await refused(client().images.generate({ ...picture, quality: "hd" })),
    ];
  },
  async timeout() {
    return await refused(client({ timeout: 500 }).images.generate({ ...picture, num_inference_steps: 100000 }));
  },
  async cancel() {
    const controller = new AbortController();
    setTimeout(() => controller.abort(), 500);
    const endless = { ...picture, num_inference_steps: 100000 };
    return await refused(client().images.generate(endless, { signal: controller.signal }));
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
