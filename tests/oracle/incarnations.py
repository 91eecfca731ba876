"""The incarnations of ledger envs: those that results show, and those in journals.

An incarnation of an env begins when the env gets a seed, and ends when it gets another
seed or is rebuilt. It is identified by the number of actions applied in it and their
hash. Two different incarnations agree in both with a probability of only 2**-64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tests.oracle.journal import Array
from tests.oracle.ledger_env import HASH_FACTOR, HASH_TERM

#: Number of actions applied in an incarnation, and their hash.
ActionDigest = tuple[int, int]


@dataclass(frozen=True)
class Incarnation:
    """An incarnation of a row's env, according to the results received.

    Attributes:
      number: The incarnation's number, or -1 if the caller specified the seed.
      observed: Digest of the actions that were applied according to the results.
      possible: Other digests that are possible, because some actions have no result.
    """

    env_index: int
    number: int
    seed: int
    observed: ActionDigest
    possible: frozenset[ActionDigest] = frozenset()

    def __str__(self) -> str:
        which = "" if self.number < 0 else f"incarnation {self.number}, "
        return f"env {self.env_index} ({which}seed {self.seed})"


def journaled_incarnations(records: Array) -> Iterator[tuple[int, int, ActionDigest]]:
    """Yield the process id, seed and digest of each incarnation in a journal."""
    if not len(records):
        return
    order = np.lexsort((records["seed"], records["pid"]))  # keeps the order of actions
    records = records[order]
    pid, seed = records["pid"], records["seed"]
    place = records["episode"].astype(np.int64) << 32 | records["step"]
    # Each incarnation runs in one process, where its episode and step only increase.
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


def audit(incarnations: Iterable[Incarnation], records: Array) -> tuple[int, list[str]]:
    """Compare incarnations with a journal.

    Returns:
      The number of actions that were applied but whose result was never received, and a
      description of each contradiction.
    """
    unmatched: dict[int, list[Incarnation]] = defaultdict(list)
    for incarnation in incarnations:
        unmatched[incarnation.seed].append(incarnation)
    num_unseen = 0
    wrong = []
    for pid, seed, digest in journaled_incarnations(records):
        candidates = unmatched[seed]
        match = _find(candidates, digest)
        if match is None:
            wrong.append(_describe_stray(pid, seed, digest, candidates))
            if candidates:
                candidates.pop(0)
            continue
        candidates.remove(match)
        num_unseen += max(0, digest[0] - match.observed[0])
    for incarnation in (
        incarnation for rest in unmatched.values() for incarnation in rest
    ):
        if incarnation.observed[0] and all(count for count, _ in incarnation.possible):
            wrong.append(
                f"{incarnation}: expected {incarnation.observed[0]} actions in the "
                "journal; got none"
            )
    return num_unseen, wrong


def _find(
    candidates: Sequence[Incarnation], digest: ActionDigest
) -> Incarnation | None:
    exact = [
        incarnation for incarnation in candidates if incarnation.observed == digest
    ]
    others = [
        incarnation for incarnation in candidates if digest in incarnation.possible
    ]
    return next(iter(exact + others), None)


def _describe_stray(
    pid: int, seed: int, digest: ActionDigest, candidates: Sequence[Incarnation]
) -> str:
    if not candidates:
        return (
            f"process {pid} applied {digest[0]} actions to an env with seed {seed}, "
            "which belongs to no incarnation of any row"
        )
    incarnation = candidates[0]
    allowed = sorted({incarnation.observed, *incarnation.possible})
    counts = " or ".join(str(count) for count, _ in allowed)
    if any(count == digest[0] for count, _ in allowed):
        return (
            f"{incarnation}: process {pid} applied {counts} actions, but not those sent"
        )
    return f"{incarnation}: expected {counts} actions in the journal; got {digest[0]}"
