"""Run the demo: servers, envs that learn, a replay check, and faults to inject."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import gymnasium
import numpy as np

from envserve.client import BatchEnv
from envserve.demo.learner import Learner
from envserve.demo.replay_check import ReplayCheck
from envserve.demo.servers import DemoServer
from envserve.demo.tcp_proxy import TcpProxy
from envserve.envs.registry import Registry, make_env
from envserve.envs.seeding import draw_root_seed
from envserve.envs.user_envs import env_name_of
from envserve.errors import EnvTimeout, ServerError
from envserve.slab import Status
from envserve.worker.reset_signature import complete_reset_signature

Array = np.ndarray[Any, Any]

_NUM_SERVERS: Final = 2
_CUT_SECONDS: Final = 2.0
_REPORT_SECONDS: Final = 0.25
_RECV_SECONDS: Final = 0.1
#: No step takes so long, as a rule.
_SILENT_SECONDS: Final = 0.5
#: Within this time envs are back, whatever was done.
_PATIENCE_SECONDS: Final = 30.0


class Demo:
    """Everything but what shows it; a context manager.

    Attributes:
      servers: What serves the envs, in row order, as many rows each.
      faults: The faults to inject, by name: a label, and a function that injects it,
        waits for recovery, and returns a sentence with the recovery time.
      row: The last line of `metrics.jsonl`.
      has_ended: Set when the envs are stepped no more; `check` raises why.
    """

    def __init__(self, env: str, num_envs: int, folder: Path) -> None:
        """Starts everything, files in a folder, which takes about a second.

        The env is one as of `envserve start`.

        Raises:
          EnvserveError: There is no such env, its spaces are not for the learner, or a
            server does not start.
        """
        self.faults: dict[str, tuple[str, Callable[[], str]]] = {}
        for name, label, act in (
            ("worker", "Kill a worker", lambda it: it.signal_worker(signal.SIGKILL)),
            ("env", "Hang an env", lambda it: it.signal_worker(signal.SIGSTOP)),
            ("server", "Kill a server", DemoServer.kill_and_restart),
            ("network", "Cut the network", lambda it: it.proxy.cut(_CUT_SECONDS)),
        ):
            self.faults[name] = label, partial(self._inject, label, act)
        self.row: dict[str, float] = {"steps": 0, "rows_checked": 0, "demo_wrong": 0}
        self.has_ended = threading.Event()
        self._env, self._num_envs, self._folder = env, num_envs, folder
        self._status = np.full(num_envs, Status.PENDING, np.uint8)
        self._seen_at, self._away_at = np.full((2, num_envs), -np.inf)
        self._recovery: dict[str, float] = {}
        self._injecting, self._stepped = threading.Lock(), threading.Condition()
        self._error: BaseException | None = None
        Registry([env])
        self._seed = draw_root_seed()
        self._learner = Learner(env, self._make_twin(), num_envs, self._seed)
        with contextlib.ExitStack() as stack:
            self.servers = []
            for index in range(_NUM_SERVERS):
                options = env, "--step-timeout", "1", "--workers", "2"
                self.servers.append(DemoServer(folder / f"server{index}", *options))
                stack.callback(self.servers[-1].close)
            for server in self.servers:
                server.proxy = TcpProxy(server.wait_until_ready())
                stack.callback(server.proxy.close)
            self._player = threading.Thread(target=self._play, name="envserve demo")
            self._player.start()
            stack.callback(self._end)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Raises what has ended it, if anything has."""
        if self._error is not None:
            raise self._error

    def away(self) -> Array:
        """Tells of which rows the env is not there now, bool `[num_envs]`."""
        is_silent = time.monotonic() - self._seen_at > _SILENT_SECONDS
        return np.asarray(is_silent | (self._status != Status.OK))

    def _end(self) -> None:
        self.has_ended.set()
        self._player.join()
        with self._injecting:  # a server that is being started is started
            pass

    def _play(self) -> None:
        addresses = [server.proxy.address for server in self.servers]
        options = self._env, addresses, self._num_envs
        try:
            with BatchEnv.connect(*options, seed=self._seed) as batch:
                self._play_on(batch)
        except BaseException as error:
            self._error = error
        finally:
            self.has_ended.set()
            with self._stepped:
                self._stepped.notify_all()

    def _play_on(self, batch: BatchEnv) -> None:
        learner, rows = self._learner, np.arange(self._num_envs)
        checker = ReplayCheck(self._make_twin, self._num_envs, self._seed)
        observation = batch.reset()
        checker.reset(observation)
        actions = learner.act(observation, rows)
        batch.send(actions)
        began, num_valid = time.monotonic(), 0
        while not self.has_ended.is_set():
            # Nobody waits for a server that is silent; padding is no reason to hurry.
            num_padding = int((self._status == Status.PENDING).sum())
            enough = min(self._num_envs, max(self._num_envs // 2, num_padding + 1))
            with contextlib.suppress(EnvTimeout):  # the next call gets them
                rows, result = batch.recv(enough, timeout=_RECV_SECONDS)
                checker.step(rows, actions[rows], result)
                learner.learn(rows, result)
                actions[rows] = learner.act(result.observation, rows)
                batch.send(actions[rows], rows)
                self._status[rows] = result.status
                self._seen_at[rows] = time.monotonic()
                num_valid += int(result.valid.sum())
            with self._stepped:
                self._away_at[self.away()] = time.monotonic()
                self._stepped.notify_all()
            if (seconds := time.monotonic() - began) > _REPORT_SECONDS:
                self._report(checker, num_valid, seconds)
                began, num_valid = time.monotonic(), 0

    def _report(self, checker: ReplayCheck, num_valid: int, seconds: float) -> None:
        self.row = {
            "steps": self.row["steps"] + num_valid,
            "steps_per_second": num_valid / seconds,
            "rows_checked": checker.num_checked,
            "demo_wrong": checker.num_wrong,
            **self._recovery,
        }
        if self._learner.returns:
            self.row["mean_return"] = float(np.mean(self._learner.returns))
        with (self._folder / "metrics.jsonl").open("a") as file:
            print(json.dumps(self.row), file=file)

    def _make_twin(self) -> gymnasium.Env[Any, Any]:
        return complete_reset_signature(
            make_env(env_name_of(self._env), {}), needs_seed=True
        )

    def _inject(self, label: str, act: Callable[[DemoServer], None]) -> str:
        """Does something to a server, and waits for the envs that it hits."""
        with self._injecting:
            self._wait_for(lambda: not any(self.away()))
            index, share = random.randrange(_NUM_SERVERS), self._num_envs / _NUM_SERVERS
            rows = slice(int(index * share), int((index + 1) * share))
            began = time.monotonic()
            act(self.servers[index])
            self._wait_for(
                lambda: any(self._away_at[rows] > began) and not any(self.away()[rows])
            )
            milliseconds = round(1000 * (time.monotonic() - began))
            self._recovery = {"demo_recovery_ms": milliseconds}
            num_hit = int((self._away_at[rows] > began).sum())
            return f"{label}: {num_hit} envs back after {milliseconds:,} ms"

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        """Waits until envs are as they should be."""
        with self._stepped:
            is_well = self._stepped.wait_for(
                lambda: self.has_ended.is_set() or condition(), _PATIENCE_SECONDS
            )
        self.check()
        if self.has_ended.is_set() or not is_well:
            raise ServerError("the envs are not back; has the demo ended?")
