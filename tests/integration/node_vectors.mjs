// Decodes messages with the Node server's wire.mjs, and encodes them again.
// Reads {name: [frame, ...]} in hex from stdin; prints {name: {trouble, frames, body}}.

import { pathToFileURL } from "node:url";

const wire = await import(pathToFileURL(process.argv[2]).href);
let text = "";
for await (const part of process.stdin) text += part;
const decoded = {};
for (const [name, frames] of Object.entries(JSON.parse(text))) {
  const message = wire.read(frames.map((frame) => Buffer.from(frame, "hex")));
  const isMap = message.body.length && !["ASK_DRAIN", "STEP", "RESULT"].includes(name.split(" ")[0]);
  const body = isMap ? wire.unpack(message.body) : null;
  decoded[name] = { trouble: message.trouble, frames: wire.write(message).map((frame) => frame.toString("hex")), body };
}
const row = (reward, terminated, observation, final) => ({ reward, terminated, truncated: false, observation, final });
const rows = [row(0.5, false, [0.25, 0.5]), row(-1, true, [0, 0.125], [1, -1])];
decoded.rows = wire.packRows(rows).toString("hex");
const plain = (_, value) => (value instanceof Uint8Array ? { hex: Buffer.from(value).toString("hex") } : value);
// Buffer.toJSON would replace a Buffer before `plain` receives it.
delete Buffer.prototype.toJSON;
console.log(JSON.stringify(decoded, plain));
