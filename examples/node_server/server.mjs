// An envserve server in JavaScript, written from docs/protocol.md, with one worker and the env of grid.mjs.
//
//   node server.mjs [--bind tcp://127.0.0.1:5555] [--lease-seconds 60] [--insecure-no-auth]

import { randomBytes } from "node:crypto";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";
import { Reply, Router } from "zeromq";

import { envSeed, Grid, NAME, NUM_ACTIONS, NUM_OBSERVED } from "./grid.mjs";
import { replyToZap, socketOptions } from "./keys.mjs";
import { Code, pack, packRows, read, Rejection, Type, unpack, write } from "./wire.mjs";

const TOTAL_ENVS = 256;
const MAX_MESSAGE_BYTES = 1 << 20;
const MAX_ENDED = 256;
const SPACES = {
  observation_space: {
    kind: "box", dtype: 10,
    low: { shape: [NUM_OBSERVED], fill: 0 }, high: { shape: [NUM_OBSERVED], fill: 1 },
  },
  action_space: { kind: "discrete", dtype: 4, n: NUM_ACTIONS, start: 0 },
};

const isInt = (value, low, high) =>
  (typeof value === "bigint" || Number.isInteger(value)) && value >= low && value <= high;
const isText = (value) => typeof value === "string" && value.length <= 200;
const oneOf = (...values) => (value) => values.includes(value);
const isMap = (value) => Object.getPrototypeOf(value ?? 0) === Object.prototype;
const isSeed = (value) => isInt(value, 0, 2n ** 63n - 1n);
const isFlag = oneOf(true, false);
// For each field of ATTACH: the default (undefined if the field is required), and a function that checks its value.
const ATTACH = {
  env_name: [undefined, isText], num_envs: [undefined, (n) => isInt(n, 1, 65536)],
  num_splits: [1, (n) => isInt(n, 1, 4096)], blocks_per_split: [0, (n) => isInt(n, 0, 65536)],
  seed: [undefined, isSeed], seeded: [true, isFlag],
  first_env_index: [0, (n) => isInt(n, 0, 2 ** 32 - 1)], first_incarnation: [0, (n) => isInt(n, 0, 2 ** 32 - 1)],
  env_kwargs: [{}, (kwargs) => isMap(kwargs) || Array.isArray(kwargs)], wrappers: [[], Array.isArray],
  spare_envs: [false, isFlag], vectorized: [false, isFlag],
  autoreset: ["same_step", oneOf("same_step", "next_step", "disabled")],
  infos: ["episode_end", oneOf("all", "episode_end", "none")],
  nonfinite: ["raise", oneOf("raise", "mask", "pass")], strict_spaces: [false, isFlag],
};

const reject = (code, text, executed = 0) => {
  throw new Rejection(code, text, executed);
};

/** The envs of one client, and the last reply of each block. */
class Lease {
  constructor(settings, attachBody, epoch) {
    Object.assign(this, settings, { attachBody, epoch, grantedAt: -Infinity });
    const splits = Math.min(this.num_splits, this.num_envs);
    const perSplit = Math.min(this.blocks_per_split || 1, Math.floor(this.num_envs / splits));
    const count = splits * perSplit;
    const start = (block) => Math.floor((block * this.num_envs) / count);
    this.blocks = Array.from({ length: count }, (_, b) => [start(b), start(b + 1), 0, Math.floor(b / perSplit)]);
    this.envs = Array.from({ length: this.num_envs }, () => new Grid());
    this.rows = this.envs.map(() => ({ observation: Array(NUM_OBSERVED).fill(0), needsReset: true, isNew: true }));
    this.last = this.blocks.map(() => ({ seq: 0n }));
  }

  granted(leaseSeconds) {
    const { epoch, env_name, blocks } = this;
    return pack({ epoch, lease_seconds: leaseSeconds, env_name, ...SPACES, blocks });
  }

  /** Returns the body of a RESULT, or null if the request is ignored ("Rules of the server", 4). */
  operate(message, now) {
    const { entries, request, attempt } = message;
    const listed = entries.map(([block]) => block);
    if (!listed.length || new Set(listed).size < listed.length || listed.some((b) => b >= this.blocks.length))
      reject(Code.BAD_MESSAGE, `expected one or more different blocks below ${this.blocks.length}`);
    if (entries.some(([block, seq]) => seq <= this.last[block].seq)) {
      const { reply } = this.last[listed[0]];
      const isCopy = reply?.request === request && reply.entries.join() === entries.join();
      if (!isCopy || attempt <= reply.attempt || now < reply.at + 1000) return null;
      Object.assign(reply, { attempt, at: now });
      return reply.body;
    }
    if (entries.some(([block, seq]) => seq !== this.last[block].seq + 1n))
      reject(Code.GAP, "expected the next seq of each block");
    const indices = listed.flatMap((block) => this.rowsOf(block));
    if (message.type === Type.STEP) this.step(indices, Buffer.concat([message.body, message.payload]));
    else this.reset(listed, unpack(message.body));
    const body = packRows(indices.map((index) => this.rows[index]));
    const reply = { request, attempt, entries, body, at: -Infinity };
    entries.forEach(([block, seq]) => (this.last[block] = { seq, reply }));
    return body;
  }

  rowsOf(block) {
    const [start, stop] = this.blocks[block];
    return Array.from({ length: stop - start }, (_, index) => start + index);
  }

  step(indices, bytes) {
    if (bytes.length !== 8 * indices.length) reject(Code.BAD_MESSAGE, `expected ${8 * indices.length} bytes of actions`);
    const actions = indices.map((_, index) => bytes.readBigInt64LE(8 * index));
    if (actions.some((action) => action < 0n || action >= NUM_ACTIONS))
      reject(Code.INVALID_ACTION, `expected actions from 0 to ${NUM_ACTIONS - 1}`);
    const mustReset = (row) => row.needsReset && (row.isNew || this.autoreset === "disabled");
    if (indices.some((index) => mustReset(this.rows[index]))) reject(Code.BAD_MESSAGE, "expected a RESET first");
    indices.forEach((index, position) => {
      if (this.rows[index].needsReset) return this.begin(index, null); // autoreset is next_step
      const stepped = this.envs[index].step(Number(actions[position]));
      const row = Object.assign(this.rows[index], stepped, { final: stepped.observation });
      row.needsReset = row.terminated || row.truncated;
      if (row.needsReset && this.autoreset === "same_step") {
        row.observation = this.envs[index].reset(null);
        row.needsReset = false;
      }
    });
  }

  reset(listed, { resets, options }) {
    if (options?.length) unpack(options); // checked, but GridWalk has no reset options
    if (!Array.isArray(resets) || resets.length !== listed.length)
      reject(Code.BAD_MESSAGE, "expected a reset for each block");
    const chosen = listed.flatMap((block, position) => {
      const [given = 0, seeds = 0] = Array.isArray(resets[position]) ? resets[position] : [];
      const [start, stop] = this.blocks[block];
      const rows = given ?? this.rowsOf(block);
      const areRows = Array.isArray(rows) && rows.every((row) => isInt(row, start, stop - 1));
      const areSeeds = Array.isArray(seeds) && seeds.every((seed) => seed === null || isSeed(seed));
      if (!areRows || new Set(rows).size < rows.length || !(seeds === null || (areSeeds && seeds.length === rows.length)))
        reject(Code.BAD_MESSAGE, "expected different rows of the block, and a seed or nil for each");
      return rows.map((row, index) => [Number(row), seeds?.[index] ?? null]);
    });
    const ended = { reward: 0, terminated: false, truncated: false };
    for (const index of listed.flatMap((block) => this.rowsOf(block))) Object.assign(this.rows[index], ended);
    for (const [index, seed] of chosen) this.begin(index, seed);
  }

  begin(index, given) {
    const row = this.rows[index];
    const { seed, first_env_index: first, first_incarnation: incarnation } = this;
    const firstSeed = () => (this.seeded ? envSeed(seed, first + index, incarnation) : randomBytes(4).readUInt32LE());
    const observation = this.envs[index].reset(given ?? (row.isNew ? firstSeed() : null));
    const ended = { reward: 0, terminated: false, truncated: false };
    Object.assign(row, { observation, ...ended, needsReset: false, isNew: false });
  }
}

/** Handles the messages of all sessions, without performing I/O. */
export class Server {
  constructor(leaseSeconds = 60) {
    Object.assign(this, { leaseSeconds, leases: new Map(), ended: new Map(), numLeases: 0 });
    this.boot = randomBytes(8).readBigUInt64LE() | 1n;
  }

  /** Returns the frames of the reply to a message, or null if there is none. */
  handle(frames, now) {
    const message = read(frames);
    if (message === null || message.type >= 128) return null;
    try {
      const reply = this.dispatch(message, now);
      return reply && this.reply(message, reply);
    } catch (error) {
      let { code, executed, message: text } = error;
      if (!(error instanceof Rejection)) {
        console.error(error);
        [code, executed, text] = [Code.INTERNAL, 2, "the server failed to handle this message"];
        if (this.leases.delete(message.session)) this.ended.set(message.session, text);
      }
      if ([Code.BAD_MESSAGE, Code.FENCED].includes(code) && message.attempt) executed = 2;
      const body = pack({ code, executed, text });
      return this.reply(message, { type: Type.ERROR, version: message.version, body });
    }
  }

  reply({ session, epoch, request, attempt, entries }, more) {
    return write({ session, boot: this.boot, epoch, request, attempt, entries, ...more });
  }

  dispatch(message, now) {
    const { type, session } = message;
    if (message.trouble) reject(Code.BAD_MESSAGE, message.trouble);
    if (type === Type.HELLO) return this.welcome(unpack(message.body));
    if (message.version !== 2) reject(Code.VERSION_MISMATCH, "expected protocol version 2");
    if (type === Type.JOIN) reject(Code.BAD_MESSAGE, "this server does not support invitations");
    if (type === 0 || type > Type.JOIN) reject(Code.UNSUPPORTED, `unknown message type ${type}`);
    if (message.boot !== this.boot) reject(Code.FENCED, "this request was sent before the server started");
    const lease = this.leases.get(session);
    if (lease) lease.heardAt = now;
    if (type === Type.DETACH) return this.end(session, "") ?? { type: Type.DETACHED };
    if (type === Type.ATTACH) return this.attach(message, lease, now);
    if (!lease) reject(Code.LEASE_LOST, this.ended.get(session) || "this session has no envs", message.attempt && 2);
    if (message.epoch !== lease.epoch) reject(Code.FENCED, "this request was sent before the lease was granted");
    if (type === Type.PING) return { type: Type.PONG, body: pack({ running: {} }) };
    if (type === Type.CALL) reject(Code.REFUSED, "the envs of this server have no attributes to call");
    const body = lease.operate(message, now);
    if (body === null) return null;
    return body.length > 65536 ? { type: Type.RESULT, payload: body } : { type: Type.RESULT, body };
  }

  welcome({ min_version: low, max_version: high }) {
    if (!isInt(low, 0, 255) || !isInt(high, 0, 255)) reject(Code.BAD_MESSAGE, "expected min_version and max_version");
    if (low > 2 || high < 2) reject(Code.VERSION_MISMATCH, `expected versions that include 2, got ${low} to ${high}`);
    const body = pack({
      min_version: 2, max_version: 2, max_message_bytes: MAX_MESSAGE_BYTES, lease_seconds: this.leaseSeconds,
      env_names: [NAME], num_names: 1, total_envs: TOTAL_ENVS, free_envs: this.freeEnvs,
    });
    return { type: Type.WELCOME, body };
  }

  get freeEnvs() {
    return [...this.leases.values()].reduce((free, lease) => free - lease.num_envs, TOTAL_ENVS);
  }

  attach(message, lease, now) {
    const { session, body } = message;
    if (this.ended.has(session) && !lease) {
      if (this.ended.get(session)) reject(Code.LEASE_LOST, this.ended.get(session), 2);
      return { type: Type.DETACHED };
    }
    if (!lease) {
      lease = new Lease(this.readAttach(session, body), body, ++this.numLeases);
      this.leases.set(session, lease);
      lease.heardAt = now;
    }
    if (!lease.attachBody.equals(body)) reject(Code.BAD_MESSAGE, "this session has already attached with different arguments");
    if (now < lease.grantedAt + 1000) return { type: Type.BUILDING, body: pack({ elapsed_ms: 0 }) };
    lease.grantedAt = now;
    return { type: Type.GRANTED, epoch: lease.epoch, body: lease.granted(this.leaseSeconds) };
  }

  readAttach(session, body) {
    const given = unpack(body);
    const settings = {};
    for (const [name, [fallback, isValid]] of Object.entries(ATTACH)) {
      const value = given[name] ?? fallback;
      if (!isValid(value)) reject(Code.BAD_MESSAGE, `expected a valid ${name}; it is missing or invalid`);
      settings[name] = typeof value === "bigint" && name !== "seed" ? Number(value) : value;
    }
    if (session === 0n) reject(Code.BAD_MESSAGE, "expected a session that is not 0");
    if (settings.env_name !== NAME) reject(Code.UNKNOWN_ENV, `expected ${NAME}, the only env of this server`);
    if (settings.wrappers.length) reject(Code.BAD_WRAPPER, "this server has no wrappers");
    if (Object.keys(settings.env_kwargs).length || settings.spare_envs || settings.vectorized)
      reject(Code.REFUSED, "this server does not support env_kwargs, spare_envs or vectorized");
    if (settings.num_envs > this.freeEnvs) reject(Code.ENVS_BUSY, `${this.freeEnvs} of ${TOTAL_ENVS} envs are free`);
    return settings;
  }

  /** Ends a lease; `reason` is empty if the client requested it. */
  end(session, reason) {
    if (!this.leases.delete(session)) {
      if (this.ended.get(session)) reject(Code.LEASE_LOST, this.ended.get(session), 2);
      return;
    }
    this.ended.set(session, reason);
    if (this.ended.size > MAX_ENDED) this.ended.delete(this.ended.keys().next().value);
  }

  endSilent(now) {
    for (const [session, lease] of this.leases)
      if (now > lease.heardAt + 1000 * this.leaseSeconds) this.end(session, "its client sent no messages");
  }
}

async function main() {
  const { values: flags } = parseArgs({
    options: {
      bind: { type: "string", default: "tcp://127.0.0.1:5555" },
      "lease-seconds": { type: "string", default: "60" },
      "insecure-no-auth": { type: "boolean", default: false },
    },
  });
  const hasKeys = flags.bind.startsWith("tcp:") && !flags["insecure-no-auth"];
  if (hasKeys) replyToZap(new Reply());
  const router = new Router({
    mandatory: true, linger: 100, sendTimeout: 0, sendHighWaterMark: 64, receiveHighWaterMark: 256,
    maxMessageSize: MAX_MESSAGE_BYTES + 64, ...(hasKeys ? socketOptions() : {}),
  });
  const server = new Server(Number(flags["lease-seconds"]));
  await router.bind(flags.bind);
  for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(0));
  setInterval(() => server.endSilent(performance.now()), 250);
  console.log(`ready on ${router.lastEndpoint}`);
  for await (const [route, ...frames] of router) {
    const reply = server.handle(frames, performance.now());
    // Ignore errors: a client that is unreachable, or reads too slowly, will resend its request.
    if (reply) await router.send([route, ...reply]).catch(() => {});
  }
}

if (import.meta.url === pathToFileURL(process.argv[1]).href) await main();
