// An env in which a walker searches for a goal on a grid, and the protocol's derivation of env seeds.

const SIZE = 5;
const MAX_STEPS = 30;
const MOVES = [[0, 1], [0, -1], [1, 0], [-1, 0]];

export const NAME = "GridWalk-v0";
export const NUM_ACTIONS = MOVES.length;
export const NUM_OBSERVED = 4;

export class Grid {
  /** Starts an episode. If the seed is null, the random generator keeps its state. */
  reset(seed) {
    if (seed !== null) this.state = Number(BigInt.asUintN(32, BigInt(seed)));
    const cell = () => Math.floor(this.random() * SIZE);
    [this.x, this.y, this.goalX, this.goalY] = [cell(), cell(), cell(), cell()];
    if (this.x === this.goalX && this.y === this.goalY) this.goalX = (this.goalX + 1) % SIZE;
    this.steps = 0;
    return this.observe();
  }

  step(action) {
    const inside = (value) => Math.min(SIZE - 1, Math.max(0, value));
    this.x = inside(this.x + MOVES[action][0]);
    this.y = inside(this.y + MOVES[action][1]);
    const terminated = this.x === this.goalX && this.y === this.goalY;
    const truncated = !terminated && ++this.steps === MAX_STEPS;
    return { observation: this.observe(), reward: terminated ? 1 : -0.05, terminated, truncated };
  }

  observe() {
    return [this.x, this.y, this.goalX, this.goalY].map((value) => value / (SIZE - 1));
  }

  /** Returns a random number in [0, 1), by Mulberry32. */
  random() {
    this.state = (this.state + 0x6d2b79f5) >>> 0;
    let z = Math.imul(this.state ^ (this.state >>> 15), this.state | 1);
    z ^= z + Math.imul(z ^ (z >>> 7), z | 61);
    return ((z ^ (z >>> 14)) >>> 0) / 2 ** 32;
  }
}

const wordsOf = (value) => {
  const words = [];
  for (let rest = BigInt(value); words.length === 0 || rest > 0n; rest >>= 32n) words.push(Number(rest & 0xffffffffn));
  return words;
};

/** Returns the first number of NumPy's SeedSequence(seed, spawn_key=(index, incarnation)). */
export function envSeed(seed, index, incarnation) {
  const entropy = wordsOf(seed);
  while (entropy.length < 4) entropy.push(0);
  entropy.push(...wordsOf(index), ...wordsOf(incarnation));
  let constant = 0x43b0d7e5;
  const hash = (value) => {
    value ^= constant;
    constant = Math.imul(constant, 0x931e8875);
    value = Math.imul(value, constant);
    return value ^ (value >>> 16);
  };
  const mix = (a, b) => {
    const mixed = Math.imul(a, 0xca01f9dd) - Math.imul(b, 0x4973f715);
    return mixed ^ (mixed >>> 16);
  };
  const pool = entropy.slice(0, 4).map(hash);
  for (let from = 0; from < 4; from++)
    for (let to = 0; to < 4; to++) if (from !== to) pool[to] = mix(pool[to], hash(pool[from]));
  for (const word of entropy.slice(4)) for (let to = 0; to < 4; to++) pool[to] = mix(pool[to], hash(word));
  const drawn = Math.imul(pool[0] ^ 0x8b51f9dd, Math.imul(0x8b51f9dd, 0x58f38ded));
  return (drawn ^ (drawn >>> 16)) >>> 0;
}
