"""`train`: complete PPO training runs, compared with SB3 at equal settings.

The seconds of rollouts and updates come from ppo's metrics; for Stable-Baselines3, they
are measured around the calls.
"""

import contextlib
import functools
import importlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.cases.peers import import_peer, sb3_vec_env
from benchmarks.command import (
    CORES,
    EnvName,
    NumEnvs,
    Repetitions,
    Run,
    Workers,
    sub_command,
)
from benchmarks.harness import Case
from benchmarks.learning.rollouts import load_tensorflow
from benchmarks.result import median, ratio, spread
from envserve.bench.cases import BINDS, running_server
from envserve.bench.interleaved import Measure, Metric
from envserve.bench.workload import Workload
from ppo.config import Config
from ppo.run_folder.folder import RunFolder

ROLLOUT, UPDATE, TOTAL = "rollout_seconds", "update_seconds", "total_seconds"
"""Names of measured numbers: seconds per iteration."""

_ENDLESS = 10**9

_OURS, _OVERLAPPED, _SERVED = "ppo", "ppo, overlap=true", "ppo, tcp server"
_SUBPROCESS, _DUMMY = "SB3, SubprocVecEnv", "SB3, DummyVecEnv"
_SB3_ON_OURS = "SB3, envserve.sb3"
_NUMBERS = {"rollout": ROLLOUT, "update": UPDATE, "total": TOTAL}


@sub_command
def train(
    run: Run,
    env: EnvName = "HalfCheetah-v5",
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    horizon: Annotated[int, typer.Option(min=1, help="Batch steps per rollout.")] = 128,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs per update.")] = 10,
    minibatch_size: Annotated[
        int, typer.Option(min=1, help="Steps per minibatch.")
    ] = 64,
    iterations: Annotated[
        int, typer.Option(min=1, help="Iterations per measurement.")
    ] = 4,
    repetitions: Repetitions = 3,
) -> None:
    """Measure rollout, update and total time of PPO's iterations."""
    config = Config(
        env_name=env,
        num_envs=num_envs,
        horizon=horizon,
        epochs=epochs,
        minibatch_size=minibatch_size,
    )
    overlapped = config.replace(overlap=True)
    work = {"config": config, "iterations": iterations}
    local = {"workers": workers}
    cases = [
        Case(_OURS, training_ours, {**work, **local}),
        Case(_OVERLAPPED, training_ours, {**work, "config": overlapped, **local}),
        Case(_SERVED, training_ours, {**work, **local, "bind": BINDS["tcp"][0]}),
        Case(_SUBPROCESS, training_sb3, {**work, "vec_env": "SubprocVecEnv"}),
        Case(_DUMMY, training_sb3, {**work, "vec_env": "DummyVecEnv"}),
        Case(_SB3_ON_OURS, training_sb3, {**work, **local, "vec_env": ""}),
    ]
    Workload(env, 1, 1, 0).check()
    measured = run.measure(cases, repetitions)
    steps = config.steps_per_iteration

    def speed(numbers: Mapping[str, float]) -> float:
        return steps / numbers[TOTAL]

    def milliseconds(name: str) -> Metric:
        return lambda numbers: 1e3 * numbers[name]

    run.publish(
        title=f"PPO on {env}, {num_envs} envs, {steps:,} steps an iteration, {epochs} "
        f"epochs, minibatches of {minibatch_size}, networks of 64x64: ms per iteration",
        measured=measured,
        columns={
            "steps/s": median(speed),
            "lowest - highest": spread(speed),
            **{f"{n} ms": median(milliseconds(k)) for n, k in _NUMBERS.items()},
            **{f"{n} x": ratio(_OURS, key) for n, key in _NUMBERS.items()},
        },
        notes=[
            f"ppo and envserve.sb3 step envs in {workers} workers; ppo trains with two "
            "TensorFlow threads, SB3 with one torch thread. ppo also normalises "
            "observations, scales rewards and writes metrics. x: duration relative to "
            "ppo's.",
        ],
    )


@contextlib.contextmanager
def training_ours(
    config: Config, iterations: int, workers: int, bind: str = ""
) -> Iterator[Measure]:
    """Train with `ppo.train.train`; training is paused between measurements.

    With `bind`, the envs run on a server at that address, with keys.
    """
    with paused_training(config, workers, bind) as (gate, run_folder):
        gate.let_pass(1)  # do not measure the first iteration, which compiles

        def measure() -> Mapping[str, float]:
            seconds = gate.let_pass(iterations)
            lines = run_folder.joinpath("metrics.jsonl").read_text().splitlines()
            metrics = [json.loads(line) for line in lines[-iterations:]]
            return {
                ROLLOUT: sum(m["rollout_seconds"] for m in metrics) / iterations,
                UPDATE: sum(m["update_seconds"] for m in metrics) / iterations,
                TOTAL: seconds / iterations,
            }

        yield measure


@contextlib.contextmanager
def paused_training(
    config: Config, workers: int, bind: str = ""
) -> Iterator[tuple["Gate", Path]]:
    """Run `ppo.train.train` in a thread, and stop it at the end of the `with` block.

    Yields:
      A gate that lets iterations of the training pass, and the path of the run
      folder. No iteration has passed yet.
    """
    load_tensorflow()
    from ppo.environments import env_maker
    from ppo.train import train

    # SB3 writes no checkpoints, so write none after the first.
    config = config.replace(total_steps=_ENDLESS, checkpoint_seconds=float(_ENDLESS))
    gate = Gate()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        run_folder = RunFolder.create(Path(folder, "run"), config)
        if bind:
            load = Workload(config.env_name, config.num_envs, workers, 0)
            addresses = [stack.enter_context(running_server(load, bind))]
            make_env = env_maker(config, addresses)
        else:
            make_env = env_maker(config, num_workers=workers)
        run = functools.partial(
            train,
            config,
            run_folder,
            make_env,
            on_progress=lambda progress: gate.arrive(),
            should_stop=lambda: gate.is_closed,
        )
        with gate.run_in_thread(run):
            yield gate, run_folder.path


class Gate:
    """Pauses a training run, which another thread executes, after each iteration."""

    def __init__(self) -> None:
        self.is_closed = False
        self._permits = threading.Semaphore(0)
        self._arrivals = threading.Semaphore(0)
        self._error: BaseException | None = None

    def arrive(self) -> None:
        """Signal the end of an iteration, and wait until the next one may start."""
        self._arrivals.release()
        if not self.is_closed:
            self._permits.acquire()

    def let_pass(self, iterations: int) -> float:
        """Let training run a number of iterations; return their duration in seconds."""
        started = time.perf_counter()
        for _ in range(iterations):
            self._permits.release()
            self._arrivals.acquire()
            if self._error is not None:
                raise self._error
        return time.perf_counter() - started

    @contextlib.contextmanager
    def run_in_thread(self, train: Callable[[], Any]) -> Iterator[None]:
        """Run `train` in a thread; stop it at the end of the `with` block."""

        def run() -> None:
            self._permits.acquire()
            try:
                train()
            except BaseException as error:  # raised again by `let_pass`
                self._error = error
                self._arrivals.release()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self.is_closed = True
            self._permits.release()
            thread.join()


@contextlib.contextmanager
def training_sb3(
    config: Config, iterations: int, vec_env: str, workers: int = 1
) -> Iterator[Measure]:
    """Train with Stable-Baselines3's PPO, on its vectorised envs or on envserve's."""
    torch = import_peer("torch")
    stable_baselines3 = import_peer("stable_baselines3")
    torch.set_num_threads(1)
    load = Workload(config.env_name, config.num_envs, 1, 0)
    if vec_env:
        created = sb3_vec_env(load, vec_env)
    else:
        sb3 = importlib.import_module("envserve.sb3")
        created = sb3.make_vec_env(load.env_name, load.num_envs, num_workers=workers)
    with contextlib.closing(created) as envs:
        model = stable_baselines3.PPO(
            "MlpPolicy",
            envs,
            learning_rate=config.learning_rate,
            n_steps=config.horizon,
            batch_size=config.minibatch_size,
            n_epochs=config.epochs,
            gamma=config.discount,
            gae_lambda=config.gae_lambda,
            policy_kwargs={
                "net_arch": {
                    "pi": list(config.policy_layers),
                    "vf": list(config.value_layers),
                }
            },
            seed=config.seed,
            device="cpu",
        )
        clock = _Clock()
        model.collect_rollouts = clock.timed(ROLLOUT, model.collect_rollouts)
        model.train = clock.timed(UPDATE, model.train)
        model.learn(config.steps_per_iteration)

        def measure() -> Mapping[str, float]:
            clock.seconds = {}
            learn = clock.timed(TOTAL, model.learn)
            learn(iterations * config.steps_per_iteration, reset_num_timesteps=False)
            return {name: s / iterations for name, s in clock.seconds.items()}

        yield measure


class _Clock:
    """Measures the total duration of function calls.

    Attributes:
      seconds: Maps names of functions to their total durations.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `function` that adds its duration to `seconds[name]`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            elapsed = time.perf_counter() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            return result

        return call
