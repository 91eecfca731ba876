"""The lives of ledgers, from seed to seed: as callers saw them, and as journals say.

A life is known by how many actions were applied in it, and by their hash: two lives
that agree in both are the same, but for a chance of 2**-64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.journal import Array
from tests.oracle.ledger_env import HASH_FACTOR, HASH_TERM

#: How many actions a life has had, and their hash.
Ending = tuple[int, int]


@dataclass(frozen=True)
class Incarnation:
    """An incarnation as a caller saw it.

    Attributes:
      incarnation: Which one, or -1 for a seed that was given.
      seen: How it ended, by the results that came.
      unseen: How else it may have ended: with actions whose result never came.
    """

    env_index: int
    incarnation: int
    seed: int
    seen: Ending
    unseen: frozenset[Ending] = frozenset()

    def __str__(self) -> str:
        which = "" if self.incarnation < 0 else f"incarnation {self.incarnation}, "
        return f"env {self.env_index} ({which}seed {self.seed})"


def journaled_lives(records: Array) -> Iterator[tuple[int, int, Ending]]:
    """Yields process id, seed and ending of each life of a journal."""
    if not len(records):
        return
    order = np.lexsort((records["seed"], records["pid"]))  # stable
    records = records[order]
    pid, seed = records["pid"], records["seed"]
    place = records["episode"].astype(np.int64) << 32 | records["step"]
    # A life lives in one process. In it, place by place goes up.
    is_first = np.ones(len(records), np.bool_)
    is_first[1:] = (
        (pid[1:] != pid[:-1]) | (seed[1:] != seed[:-1]) | (place[1:] <= place[:-1])
    )
    starts = np.flatnonzero(is_first)
    counts = np.diff(starts, append=len(records))
    # hash = sum over i of (action_i + term) * factor**(count - 1 - i), modulo 2**64
    powers = np.full(int(counts.max()), HASH_FACTOR, np.int64)
    powers[0] = 1
    powers = np.cumprod(powers)
    left = np.repeat(starts + counts, counts) - 1 - np.arange(len(records))
    terms = (records["action"].astype(np.int64) + HASH_TERM) * powers[left]
    hashes = np.add.reduceat(terms, starts)
    yield from zip(
        pid[starts].tolist(),
        seed[starts].tolist(),
        zip(counts.tolist(), hashes.tolist(), strict=True),
        strict=True,
    )


def audit(lives: Iterable[Incarnation], records: Array) -> tuple[int, list[str]]:
    """Compares lives with a journal.

    Returns:
      How many actions were applied whose result never came; and each discrepancy.
    """
    open_lives: dict[int, list[Incarnation]] = defaultdict(list)
    for life in lives:
        open_lives[life.seed].append(life)
    num_unseen = 0
    wrong = []
    for pid, seed, ending in journaled_lives(records):
        candidates = open_lives[seed]
        match = _find(candidates, ending)
        if match is None:
            wrong.append(_describe_stray(pid, seed, ending, candidates))
            if candidates:
                candidates.pop(0)
            continue
        candidates.remove(match)
        num_unseen += max(0, ending[0] - match.seen[0])
    for life in (life for rest in open_lives.values() for life in rest):
        if life.seen[0] and all(count for count, _ in life.unseen):
            wrong.append(
                f"{life}: expected {life.seen[0]} actions in the journal; got none"
            )
    return num_unseen, wrong


def _find(candidates: Sequence[Incarnation], ending: Ending) -> Incarnation | None:
    exact = [life for life in candidates if life.seen == ending]
    others = [life for life in candidates if ending in life.unseen]
    return next(iter(exact + others), None)


def _describe_stray(
    pid: int, seed: int, ending: Ending, candidates: Sequence[Incarnation]
) -> str:
    if not candidates:
        return (
            f"process {pid} applied {ending[0]} actions to an env with seed {seed}, "
            "which no row is known to have had there and then"
        )
    life = candidates[0]
    allowed = sorted({life.seen, *life.unseen})
    counts = " or ".join(str(count) for count, _ in allowed)
    if any(count == ending[0] for count, _ in allowed):
        return f"{life}: process {pid} applied {counts} actions, but other ones"
    return f"{life}: expected {counts} actions in the journal; got {ending[0]}"
