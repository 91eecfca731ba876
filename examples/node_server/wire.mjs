// Encodes and decodes messages: docs/protocol.md, "Frame 0" and "Msgpack".

import { decode, encode } from "@msgpack/msgpack";

export const Type = {
  HELLO: 1, ATTACH: 2, STEP: 3, RESET: 4, CALL: 5, PING: 6, DETACH: 7, JOIN: 8,
  WELCOME: 129, GRANTED: 130, BUILDING: 131, RESULT: 132, PONG: 134, DETACHED: 135,
  ERROR: 143,
};
export const Code = {
  BAD_MESSAGE: 1, UNSUPPORTED: 2, VERSION_MISMATCH: 3, UNKNOWN_ENV: 4, ENVS_BUSY: 5,
  REFUSED: 6, LEASE_LOST: 8, FENCED: 9, GAP: 10, INVALID_ACTION: 11, INTERNAL: 14, BAD_WRAPPER: 15,
};
const BODY_LIMITS = { 1: 4096, 2: 4096, 3: 65536, 4: 983040, 5: 65536, 6: 4096, 7: 4096, 8: 4096 };
const PREFIX_BYTES = 44;
const ENTRY_BYTES = 12;
const MAX_ENTRIES = 4096;

/** An error that is sent to the client as an ERROR message. */
export class Rejection extends Error {
  constructor(code, text, executed = 0) {
    super(text);
    Object.assign(this, { code, executed });
  }
}

/** Parses frames; returns null if the prefix is invalid. The field `trouble` describes any other error. */
export function read(frames) {
  const [head, payload = Buffer.alloc(0), report = Buffer.alloc(0)] = frames;
  if (head.length < PREFIX_BYTES || head.toString("latin1", 0, 4) !== "ENVS") return null;
  const count = head.readUInt16LE(38);
  const bodyBytes = head.readUInt32LE(40);
  const message = {
    version: head[4], type: head[5], session: head.readBigUInt64LE(8), boot: head.readBigUInt64LE(16),
    epoch: head.readUInt32LE(24), request: head.readBigUInt64LE(28), attempt: head.readUInt16LE(36),
    entries: [], body: Buffer.alloc(0), payload, report, trouble: "",
  };
  const start = PREFIX_BYTES + count * ENTRY_BYTES;
  const limit = BODY_LIMITS[message.type] ?? Infinity;
  if (frames.length > 3 || count > MAX_ENTRIES || bodyBytes > limit || head.length !== start + bodyBytes) {
    message.trouble = `expected at most 3 frames, ${MAX_ENTRIES} blocks and a body of ${limit} bytes that ends with its frame`;
    return message;
  }
  for (let offset = PREFIX_BYTES; offset < start; offset += ENTRY_BYTES)
    message.entries.push([head.readUInt32LE(offset), head.readBigUInt64LE(offset + 4)]);
  message.body = head.subarray(start);
  return message;
}

/** Returns the frames of a message. */
export function write({ version = 2, type, session, boot, epoch, request, attempt, entries = [], body, payload, report }) {
  const prefix = Buffer.alloc(PREFIX_BYTES + entries.length * ENTRY_BYTES);
  prefix.write("ENVS", "latin1");
  prefix.set([version, type], 4);
  prefix.writeBigUInt64LE(session, 8);
  prefix.writeBigUInt64LE(boot, 16);
  prefix.writeUInt32LE(epoch, 24);
  prefix.writeBigUInt64LE(request, 28);
  prefix.writeUInt16LE(attempt, 36);
  prefix.writeUInt16LE(entries.length, 38);
  prefix.writeUInt32LE(body?.length ?? 0, 40);
  entries.forEach(([block, seq], index) => {
    prefix.writeUInt32LE(block, PREFIX_BYTES + index * ENTRY_BYTES);
    prefix.writeBigUInt64LE(seq, PREFIX_BYTES + index * ENTRY_BYTES + 4);
  });
  const head = Buffer.concat([prefix, body ?? Buffer.alloc(0)]);
  if (report?.length) return [head, payload ?? Buffer.alloc(0), report];
  return payload?.length ? [head, payload] : [head];
}

export const pack = (value) => Buffer.from(encode(value, { useBigInt64: true }));

/** Decodes a body; throws a Rejection if it is not a map. */
export function unpack(body) {
  let value;
  try {
    value = decode(body, { useBigInt64: true, maxArrayLength: 65536, maxMapLength: 65536 });
  } catch (error) {
    throw new Rejection(Code.BAD_MESSAGE, `expected a msgpack body: ${error.message}`);
  }
  if (Object.getPrototypeOf(value ?? 0) !== Object.prototype)
    throw new Rejection(Code.BAD_MESSAGE, "expected a map as body");
  return value;
}

/** Encodes the rows of a RESULT: rewards, two flags, statuses, observations, and final observations of episodes. */
export function packRows(rows) {
  const count = rows.length;
  const ended = rows.filter((row) => row.terminated || row.truncated);
  const size = rows[0].observation.length;
  const body = Buffer.alloc(11 * count + 4 * size * (count + ended.length));
  rows.forEach((row, index) => {
    body.writeDoubleLE(row.reward, 8 * index);
    body[8 * count + index] = row.terminated;
    body[9 * count + index] = row.truncated; // the status stays 0: the row is valid
  });
  const observations = [...rows.map((row) => row.observation), ...ended.map((row) => row.final)];
  observations.flat().forEach((value, index) => body.writeFloatLE(value, 11 * count + 4 * index));
  return body;
}
