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
  for (let at = 0; at < bytes.length; at += 4)
    for (let power = 85 ** 4; power >= 1; power /= 85) text += Z85[Math.floor(bytes.readUInt32BE(at) / power) % 85];
  return text;
};

/** Returns the options of a ROUTER that accepts only clients that `answerZap` authorises. */
export function socketOptions() {
  const secret = secretOf("server.key");
  if (!secret) throw new Error(`expected a key in ${FOLDER}/server.key; run "envserve keys new"`);
  return { curveServer: true, curveSecretKey: z85(secret), zapDomain: "envserve", zapEnforceDomain: true };
}

/** Authorises this user, and the clients that the `clients` file lists without limits. */
export async function answerZap(socket) {
  await socket.bind("inproc://zeromq.zap.01");
  for await (const [version, request, , , , mechanism, key] of socket) {
    const own = secretOf("client.key");
    const known = linesOf("clients").map((line) => line.split(/\s+/)).filter((words) => words.length === 2);
    const keys = known.map(([, word]) => word.replace("envserve-public-1.", ""));
    if (own) keys.push(publicOf(own));
    const isKnown = mechanism.toString() === "CURVE" && keys.includes(key.toString("base64url"));
    await socket.send([version, request, isKnown ? "200" : "400", "", isKnown ? "client" : "", ""]);
  }
}
