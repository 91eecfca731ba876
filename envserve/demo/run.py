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
from envserve.envs.registry import make_env, offered_names
from envserve.envs.seeding import draw_root_seed
from envserve.envs.user_envs import env_name_of
from envserve.errors import EnvTimeout, ServerError
from envserve.slab import Array, Status
from envserve.text import counted
from envserve.worker.reset_signature import complete_reset_signature

_NUM_SERVERS: Final = 2
_CUT_SECONDS: Final = 2.0
_REPORT_SECONDS: Final = 0.25
_RECV_SECONDS: Final = 0.1
_NOT_LOST: Final = Status.OK, Status.PENDING, Status.LATE
#: Seconds without a result after which a row counts as absent; a step takes much less.
_ABSENT_AFTER_SECONDS: Final = 0.5
#: Maximum seconds to wait until all envs have recovered from a fault.
_RECOVERY_SECONDS: Final = 30.0


class Demo:
    """The demo without its user interface; a context manager.

    A thread steps the envs, trains the learner and checks every row.

    Attributes:
      servers: The servers of the envs, in row order; each has an equal number of rows.
      controls: Maps the name of each user action to its label and a function that
        performs it and returns a message. If the action is a fault, the function waits
        until the envs have recovered.
      num_faults: Number of faults injected so far.
      metrics: Contents of the last line of `metrics.jsonl`.
      has_ended: Event that is set when the thread has exited or must exit.
    """

    def __init__(self, env: str, num_envs: int, folder: Path) -> None:
        """Start the servers and the thread; this takes about a second.

        Args:
          env: Env in one of the forms that `envserve start` accepts.
          num_envs: Number of envs, over both servers.
          folder: Folder for logs, crash files and `metrics.jsonl`.

        Raises:
          EnvserveError: The env does not exist, the learner does not support its
            spaces, or a server does not start.
        """
        self.controls: dict[str, tuple[str, Callable[[], str]]] = {}
        for name, label, act in (
            ("worker", "Kill a worker", lambda s: s.signal_worker(signal.SIGKILL)),
            ("env", "Hang an env", lambda s: s.signal_worker(signal.SIGSTOP)),
            ("server", "Kill a server", DemoServer.kill_and_restart),
            ("network", "Cut the network", lambda s: s.proxy.cut(_CUT_SECONDS)),
        ):
            self.controls[name] = label, partial(self._inject, label, act)
        self.controls["learn"] = "Learn again", self._learn_again
        self.metrics: dict[str, float] = {
            "steps": 0,
            "rows_checked": 0,
            "demo_wrong": 0,
        }
        self.num_faults = self._num_lost = self._num_padding = 0
        self.has_ended = threading.Event()
        self._env, self._num_envs, self._folder = env, num_envs, folder
        self._status = np.full(num_envs, Status.PENDING, np.uint8)
        self._received_at, self._absent_at = np.full((2, num_envs), -np.inf)
        self._recovery: dict[str, float] = {}
        self._injecting, self._stepped = threading.Lock(), threading.Condition()
        self._error: BaseException | None = None
        offered_names([env])
        self._seed = draw_root_seed()
        self._learn_again()
        with contextlib.ExitStack() as stack:
            self.servers = []
            for index in range(_NUM_SERVERS):
                options = [env, "--step-timeout", "1", "--workers", "2"]
                options += ["--envs-per-worker", str(max(64, num_envs))]
                self.servers.append(DemoServer(folder / f"server{index}", *options))
                stack.callback(self.servers[-1].close)
            for server in self.servers:
                server.proxy = TcpProxy(server.wait_until_ready())
                stack.callback(server.proxy.close)
            self._thread = threading.Thread(target=self._run, name="envserve demo")
            self._thread.start()
            stack.callback(self._stop)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def check(self) -> None:
        """Raise the exception that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def __str__(self) -> str:
        num_checked = self.metrics["rows_checked"]
        num_wrong = self.metrics["demo_wrong"]
        faults = counted(self.num_faults, "fault")
        return f"{num_checked:,} transitions checked, {faults}, {num_wrong:,} wrong"

    def absent_rows(self) -> Array:
        """Return a mask of the rows that are absent now, bool `[num_envs]`."""
        is_silent = time.monotonic() - self._received_at > _ABSENT_AFTER_SECONDS
        return np.asarray(is_silent | (self._status != Status.OK))

    def _stop(self) -> None:
        self.has_ended.set()
        self._thread.join()
        with self._injecting:  # wait until a server that is being restarted has started
            pass

    def _run(self) -> None:
        addresses = [server.proxy.address for server in self.servers]
        try:
            with BatchEnv.connect(
                self._env, addresses, self._num_envs, seed=self._seed
            ) as batch:
                self._step_envs(batch)
        except BaseException as error:
            self._error = error
        finally:
            self.has_ended.set()
            with self._stepped:
                self._stepped.notify_all()

    def _step_envs(self, batch: BatchEnv) -> None:
        rows = np.arange(self._num_envs)
        checker = ReplayCheck(self._make_twin, self._num_envs, self._seed)
        observation = batch.reset()
        checker.reset(observation)
        actions = self._learner.act(observation, rows)
        batch.send(actions)
        started_at, num_valid = time.monotonic(), 0
        while not self.has_ended.is_set():
            # Wait for half of the rows, so that a silent server does not delay the rows
            # of the other server. Always include a row that is not padding. Padding is
            # ready immediately, so while a server is absent, this loop would never wait
            # if `recv` returned only padding.
            num_padding = int((self._status == Status.PENDING).sum())
            min_rows = min(self._num_envs, max(self._num_envs // 2, num_padding + 1))
            learner = self._learner
            with contextlib.suppress(EnvTimeout):  # after a timeout, call it again
                rows, result = batch.recv(min_rows, timeout=_RECV_SECONDS)
                checker.step(rows, actions[rows], result)
                learner.learn(rows, result)
                actions[rows] = learner.act(result.observation, rows)
                batch.send(actions[rows], rows)
                self._status[rows] = result.status
                self._received_at[rows] = time.monotonic()
                num_valid += int(result.valid.sum())
                self._num_lost += int((~np.isin(result.status, _NOT_LOST)).sum())
                self._num_padding += int((result.status == Status.PENDING).sum())
            with self._stepped:
                self._absent_at[self.absent_rows()] = time.monotonic()
                self._stepped.notify_all()
            if (seconds := time.monotonic() - started_at) > _REPORT_SECONDS:
                self._report(checker, num_valid, seconds)
                started_at, num_valid = time.monotonic(), 0
        self._report(checker, num_valid, _REPORT_SECONDS)

    def _report(self, checker: ReplayCheck, num_valid: int, seconds: float) -> None:
        self.metrics = {
            "steps": self.metrics["steps"] + num_valid,
            "steps_per_second": num_valid / seconds,
            "rows_checked": checker.num_checked - self._num_padding,
            "rows_lost": self._num_lost,
            "demo_faults": self.num_faults,
            "demo_wrong": checker.num_wrong,
            **self._recovery,
        }
        if self._learner.returns:
            self.metrics["mean_return"] = float(np.mean(self._learner.returns))
        with (self._folder / "metrics.jsonl").open("a") as file:
            print(json.dumps(self.metrics), file=file)

    def _make_twin(self) -> gymnasium.Env[Any, Any]:
        env = make_env(env_name_of(self._env), {})
        complete_reset_signature(env, needs_seed=True)
        return env

    def _inject(self, label: str, act: Callable[[DemoServer], None]) -> str:
        """Inject a fault into a random server, and wait until its envs have recovered.

        Returns:
          A sentence with the number of affected envs and the recovery time.
        """
        with self._injecting:
            self._wait_for(lambda: not any(self.absent_rows()))
            index, share = random.randrange(_NUM_SERVERS), self._num_envs / _NUM_SERVERS
            rows = slice(int(index * share), int((index + 1) * share))
            started_at = time.monotonic()
            act(self.servers[index])
            self.num_faults += 1
            self._wait_for(
                lambda: (
                    any(self._absent_at[rows] > started_at)
                    and not any(self.absent_rows()[rows])
                )
            )
            milliseconds = round(1000 * (time.monotonic() - started_at))
            self._recovery = {f"demo_recovery_ms {label}": milliseconds}
            num_envs = int((self._absent_at[rows] > started_at).sum())
            envs = f"{num_envs} envs of server {index + 1}"
            return f"{label}: {envs} recovered after {milliseconds:,} ms"

    def _learn_again(self) -> str:
        twin, seed = self._make_twin(), draw_root_seed()
        self._learner = Learner(self._env, twin, self._num_envs, seed)
        return "Learn again: a new policy learns from scratch"

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        with self._stepped:
            is_met = self._stepped.wait_for(
                lambda: self.has_ended.is_set() or condition(), _RECOVERY_SECONDS
            )
        self.check()
        if self.has_ended.is_set() or not is_met:
            raise ServerError("the demo has ended, or its envs have not recovered")
