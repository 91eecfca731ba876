"""The words in which pools, sessions and lanes speak of blocks.

A block is a range of rows that one worker steps in lockstep: the unit that is
submitted, answered, numbered and lost. At most one operation on it runs at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

import numpy as np

from envserve.errors import EnvserveError
from envserve.slab import Rows, Status
from envserve.spec import EnvSpec
from envserve.wrappers import WrapperSpec

__all__ = [
    "Autoreset",
    "Block",
    "Call",
    "Fault",
    "Infos",
    "Lane",
    "Outcome",
    "PoolConfig",
    "Reset",
    "make_blocks",
]

#: When an ended episode's env is reset, as in Gymnasium's `AutoresetMode`.
Autoreset = Literal["same_step", "next_step", "disabled"]
#: Which info dicts are reported: of all rows, of rows whose episode ended, or none.
Infos = Literal["all", "episode_end", "none"]


@dataclass(frozen=True)
class Block:
    """Rows `start` to `stop` (exclusive) of a lane, stepped by one worker.

    Attributes:
      index: Position in the lane's `blocks`.
      start: First row.
      stop: Row after the last.
      worker: Index of the worker that hosts it.
      split: Which of the `num_splits` groups it belongs to.
    """

    index: int
    start: int
    stop: int
    worker: int
    split: int


def make_blocks(num_envs: int, num_workers: int, num_splits: int) -> tuple[Block, ...]:
    """Cuts rows into blocks of nearly equal size, the blocks of one split together.

    There are never more blocks than envs: surplus splits and workers get none.
    """
    num_splits = min(num_splits, num_envs)
    num_workers = min(num_workers, num_envs // num_splits)
    count = num_splits * num_workers
    edges = [index * num_envs // count for index in range(count + 1)]
    return tuple(
        Block(
            index=index,
            start=edges[index],
            stop=edges[index + 1],
            worker=index % num_workers,
            split=index // num_workers,
        )
        for index in range(count)
    )


_COUNTS: Final = (
    *("num_envs", "num_workers", "num_splits"),
    *("seed", "first_env_index", "first_incarnation", "max_restarts"),
)


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """What a pool builds: `num_envs` equal envs in up to `num_workers` processes."""

    env_name: str
    num_envs: int
    num_workers: int
    num_splits: int = 1
    #: Root seed in [0, 2**63); the env seeds follow from it, see `seeding.env_seed`.
    seed: int
    #: Row of this pool's first env in the whole batch, over all lanes.
    first_env_index: int = 0
    #: How often every env has been built before, for who builds them anew elsewhere.
    first_incarnation: int = 0
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    #: What each env is wrapped in, the innermost first.
    wrappers: tuple[WrapperSpec, ...] = ()
    #: Modules that register envs when they are imported.
    import_modules: tuple[str, ...] = ()
    autoreset: Autoreset = "same_step"
    infos: Infos = "episode_end"
    #: Whether each row has a second env that is reset while the first is stepped.
    spare_envs: bool = False
    #: Longest that one env's step may take; then its worker is killed.
    step_timeout_seconds: float = 30.0
    #: Longest that one env's reset or construction may take.
    reset_timeout_seconds: float = 120.0
    #: Longest that a step waits for envs whose worker is being replaced, before their
    #: rows come back as padding; infinity waits for as long as it takes.
    padding_after_seconds: float = 0.1
    #: Folder for repro files of crashes; "" is one of this user's under the system's
    #: folder for temporary files, and None none at all.
    crash_dir: str | None = ""
    #: Failed starts of a worker in a row, without a step in between, before its
    #: blocks are given up.
    max_restarts: int = 5

    def __post_init__(self) -> None:
        """Checks the settings; raises ValueError with name and value."""
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name}: expected an int; got {value!r}")
        if not isinstance(self.spare_envs, bool):
            raise TypeError(f"spare_envs: expected a bool; got {self.spare_envs!r}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"expected a seed in [0, 2**63); got {self.seed}")
        for name in ("num_envs", "num_workers", "num_splits"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        for name in ("first_env_index", "first_incarnation", "max_restarts"):
            self._check(name, getattr(self, name) >= 0, "at least 0")
        for name in ("step_timeout_seconds", "reset_timeout_seconds"):
            self._check(name, getattr(self, name) > 0, "more than 0")
        self._check(
            "padding_after_seconds", self.padding_after_seconds >= 0, "at least 0"
        )
        for name, choices in (("autoreset", Autoreset), ("infos", Infos)):
            names = get_args(choices)
            self._check(name, getattr(self, name) in names, f"one of {names}")

    def _check(self, name: str, is_good: bool, expected: str) -> None:
        if not is_good:
            raise ValueError(f"{name}: expected {expected}; got {getattr(self, name)}")


@dataclass(frozen=True)
class Reset:
    """Reset of some rows of a block.

    Attributes:
      block: Index of the block.
      env_indices: Rows of the lane to reset; None for all of the block.
      seeds: A seed per row to reset; None leaves the choice to the env's own
        generator, or, right after construction, to its `env_seed`.
    """

    block: int
    env_indices: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Call:
    """Attribute access on one env.

    Attributes:
      env_index: Row of the lane.
      kind: "call" calls a method, or reads an attribute that is not callable; "get"
        reads; "set" assigns `arguments[0]`.
      name: Name of the attribute.
      arguments: Plain values, see `envserve.codec`.
    """

    env_index: int
    kind: Literal["call", "get", "set"]
    name: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Why a row's last transition is not valid.

    Attributes:
      env_index: Row of the lane.
      status: Kind of fault.
      text: What happened: the worker's traceback, or exit signal.
      is_violation: Whether the env broke its own spaces (wrong shape or dtype, or
        values that are not finite), which is a bug to mend rather than a mishap.
    """

    env_index: int
    status: Status
    text: str
    is_violation: bool = False


class Outcome(NamedTuple):
    """A block's operation has ended, and its rows are as it left them.

    Attributes:
      block: Index of the block.
      ticket: The one it was submitted with, by which it is told from an older one.
      infos: Info dict by row, as far as asked for.
      faults: Faults of this operation.
      result: Encoded result of a `Call`, else empty.
      error: Set when the operation failed as a whole.
      is_padding: Whether the step did nothing, since the envs, or their server, are not
        back yet: all rows are PENDING.
    """

    block: int
    ticket: int = 0
    infos: Mapping[int, Mapping[str, Any]] = MappingProxyType({})
    faults: Sequence[Fault] = ()
    result: bytes = b""
    error: EnvserveError | None = None
    is_padding: bool = False


class Lane(Protocol):
    """How a batch reaches envs: a pool in this process, or a server.

    Actions are written to `rows.action` before `submit_step`; what comes back is in
    `rows` from `collect` until the block's next submission. Submitting a block that
    is in flight raises LocalProtocolError.
    """

    @property
    def name(self) -> str:
        """Where the envs are, for messages: "local" or an address."""

    @property
    def spec(self) -> EnvSpec:
        """Spaces of every env of the lane."""

    @property
    def num_envs(self) -> int:
        """Number of rows."""

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks, which partition the rows."""

    @property
    def rows(self) -> Rows:
        """Where actions are read from and results are written to."""

    @property
    def is_busy(self) -> bool:
        """Whether anything is in flight, or has ended and was not collected."""

    def submit_step(
        self, blocks: Sequence[int], ticket: int = 0, is_alone: bool = False
    ) -> None:
        """Starts a step of these blocks, with the actions now in `rows.action`.

        Args:
          blocks: Which blocks.
          ticket: What `Outcome` will carry.
          is_alone: Whether the caller has no other rows that are alive: then blocks
            whose envs are not back yet are waited for. Else they finish as padding.
        """

    def submit_reset(self, resets: Sequence[Reset], ticket: int = 0) -> None:
        """Starts resets, each of another block."""

    def submit_call(self, call: Call, ticket: int = 0) -> None:
        """Starts attribute access on one env, as an operation of its block."""

    def collect(self, timeout_seconds: float, min_finished: int = 1) -> list[Outcome]:
        """Waits until so many operations have ended, and returns them.

        Fewer come back after the timeout, or when no more are in flight.
        """

    def stats(self) -> Mapping[str, int]:
        """Counts since the lane was made, by name; what is counted is the lane's."""

    def fileno(self) -> int:
        """A descriptor that is readable when `collect(0)` may have something."""

    def begin_close(self) -> None:
        """Asks all envs to end, without waiting."""

    def close(self) -> None:
        """Ends all envs, within 2 seconds even if one hangs; may be called twice."""
