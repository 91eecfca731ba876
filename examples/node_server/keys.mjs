// Authorises clients with the key files of `envserve keys`, through ZAP (ZeroMQ's RFC 27).

import { createPrivateKey, createPublicKey } from "node:crypto";
import { existsSync, readFileSync, statSync } from "node:fs";
import { homedir } from "node:os";
import { join } from "node:path";

const FOLDER = process.env.ENVSERVE_HOME || join(homedir(), ".config", "envserve");
const X25519_HEADER = Buffer.from("302e020100300506032b656e04220420", "hex");
const Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";

const linesOf = (name) => {
  const path = join(FOLDER, name);
  if (!existsSync(path)) return [];
  if (statSync(path).mode & 0o077) throw new Error(`${path} is readable by other users; run chmod 600 on it`);
  return readFileSync(path, "utf8").split("\n").map((line) => line.split("#")[0].trim()).filter(Boolean);
};

const secretOf = (name) => {
  const [line] = linesOf(name);
  return line ? Buffer.from(line.replace("envserve-secret-1.", ""), "base64url") : null;
};

const publicOf = (secret) => {
  const key = Buffer.concat([X25519_HEADER, secret]);
  return createPublicKey(createPrivateKey({ key, format: "der", type: "pkcs8" })).export({ format: "jwk" }).x;
};

const z85 = (bytes) => {
  let text = "";
  for (let offset = 0; offset < bytes.length; offset += 4)
    for (let power = 85 ** 4; power >= 1; power /= 85) text += Z85[Math.floor(bytes.readUInt32BE(offset) / power) % 85];
  return text;
};

/** Returns the options of a ROUTER socket that accepts only the clients that `replyToZap` authorises. */
export function socketOptions() {
  const secret = secretOf("server.key");
  if (!secret) throw new Error(`expected a key in ${FOLDER}/server.key; run "envserve keys new"`);
  return { curveServer: true, curveSecretKey: z85(secret), zapDomain: "envserve", zapEnforceDomain: true };
}

/** Authorises the clients of this user, and all clients in the file `clients` that have no limits. */
export async function replyToZap(socket) {
  await socket.bind("inproc://zeromq.zap.01");
  for await (const [version, request, , , , mechanism, key] of socket) {
    const secret = secretOf("client.key");
    const unlimited = linesOf("clients").map((line) => line.split(/\s+/)).filter((words) => words.length === 2);
    const keys = unlimited.map(([, word]) => word.replace("envserve-public-1.", ""));
    if (secret) keys.push(publicOf(secret)); // this user's clients
    const isKnown = mechanism.toString() === "CURVE" && keys.includes(key.toString("base64url"));
    await socket.send([version, request, isKnown ? "200" : "400", "", isKnown ? "client" : "", ""]);
  }
}
