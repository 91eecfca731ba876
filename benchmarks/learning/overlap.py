"""`overlap`: rollouts with two splits, compared with the theoretical optimum."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.cases import envs
from benchmarks.command import (
    CORES,
    NumEnvs,
    Repetitions,
    Run,
    Seconds,
    Workers,
    print_progress,
    sub_command,
)
from benchmarks.harness import Case, measure_cases
from benchmarks.learning.rollouts import load_tensorflow, repeating
from benchmarks.result import median, spread
from envserve.bench.cases import batch_env
from envserve.bench.interleaved import MICROSECONDS, Measure
from envserve.bench.workload import Workload
from envserve.envs.registry import make_env
from envserve.host_resources import num_cores

_WIDTH = 128
_ENV = "env step alone"
_POLICY = "policy alone, per split"
_POLICY_ALL = "policy alone, all rows"
_ONE, _TWO = "1 split", "2 splits"
_CALIBRATION_LAYERS = (32, 96)

_NOTE = (
    "best: computed from the parts measured alone. With 2 splits, it is the longest of "
    "four times: all work divided by the number of cores; the envs of one worker; the "
    "policy of both splits; the policy of one split, followed by this split's envs in "
    "one worker. With 1 split, it is the time of the policy plus the time of the envs."
)


class Pieces(NamedTuple):
    """Parts of a batch step, each measured alone; times in microseconds."""

    env: float
    policy_per_split: float
    policy_all_rows: float
    num_envs: int
    workers: int
    cores: int

    @property
    def envs_per_worker(self) -> int:
        """Maximum number of envs per worker."""
        return -(-self.num_envs // self.workers)

    def best_with_two_splits(self) -> float:
        """Return the minimum duration of a batch step with two splits; see `_NOTE`."""
        work = self.num_envs * self.env + 2 * self.policy_per_split
        worker = self.envs_per_worker * self.env
        sequence = self.policy_per_split + -(-self.envs_per_worker // 2) * self.env
        return max(work / self.cores, worker, 2 * self.policy_per_split, sequence)

    def best_with_one_split(self) -> float:
        """Return the minimum duration of a batch step if policy and envs alternate."""
        rounds = max(self.num_envs / self.cores, self.envs_per_worker)
        return self.policy_all_rows + rounds * self.env


@sub_command
def overlap(
    run: Run,
    num_envs: NumEnvs = 16,
    workers: Workers = CORES,
    env_milliseconds: Annotated[
        float, typer.Option(min=0.001, help="CPU time of an env step.")
    ] = 1.0,
    policy_milliseconds: Annotated[
        float, typer.Option(min=0.001, help="CPU time of the policy per split.")
    ] = 1.0,
    horizon: Annotated[int, typer.Option(min=1, help="Batch steps per rollout.")] = 32,
    seconds: Seconds = 2.0,
    repetitions: Repetitions = 3,
) -> None:
    """Measure rollouts of slow envs and a slow policy, with one and two splits."""
    kwargs = {"step_seconds": env_milliseconds / 1e3}
    load = Workload(
        "envserve/Busy-v0", num_envs, workers, seconds, kwargs, (envs.MODULE,)
    )
    half = {"rows": num_envs // 2, "seconds": seconds / 4}
    layers = _layers_for(policy_milliseconds * 1e3, half)
    rolling = {"load": load, "layers": layers, "horizon": horizon}
    cases = [
        Case(_ENV, env_alone, {"load": load}),
        Case(_POLICY, policy_alone, {**half, "layers": layers}),
        Case(_POLICY_ALL, policy_alone, {**half, "rows": num_envs, "layers": layers}),
        Case(_ONE, rolling_out, {**rolling, "num_splits": 1}),
        Case(_TWO, rolling_out, {**rolling, "num_splits": 2}),
    ]
    measured = run.measure_all(cases, repetitions)
    pieces = Pieces(
        env=measured.median(_ENV, MICROSECONDS),
        policy_per_split=measured.median(_POLICY, MICROSECONDS),
        policy_all_rows=measured.median(_POLICY_ALL, MICROSECONDS),
        num_envs=num_envs,
        workers=workers,
        cores=num_cores(),
    )
    best = {_ONE: pieces.best_with_one_split(), _TWO: pieces.best_with_two_splits()}
    run.publish(
        title=f"{num_envs} envs of {env_milliseconds:g} ms of work, {workers} workers, "
        f"a policy of {policy_milliseconds:g} ms per split: ms per batch step",
        measured=measured,
        columns={
            "ms": median(_milliseconds, ".2f"),
            "lowest - highest": spread(_milliseconds, ".2f"),
            "best, ms": lambda _, case: (
                f"{best[case] / 1e3:.2f}" if case in best else "-"
            ),
            "best / measured": lambda measured, case: (
                f"{best[case] / measured.median(case, MICROSECONDS):.2f}"
                if case in best
                else "-"
            ),
        },
        notes=[_NOTE],
        results={"best_us": best, "pieces": pieces._asdict(), "layers": layers},
    )


def _layers_for(microseconds: float, options: Mapping[str, Any]) -> int:
    """Return the number of layers with which a policy call takes `microseconds`."""
    few, many = _CALIBRATION_LAYERS
    cases = [
        Case(f"policy of {layers} layers", policy_alone, {**options, "layers": layers})
        for layers in (few, many)
    ]
    measured = measure_cases(cases, 3, print_progress)
    short, long = (measured.median(case.name, MICROSECONDS) for case in cases)
    per_layer = (long - short) / (many - few)
    return max(1, few + round((microseconds - short) / per_layer))


@contextlib.contextmanager
def env_alone(load: Workload) -> Iterator[Measure]:
    """Measure the steps of one env in this process."""
    env = make_env(load.env_name, load.env_kwargs)
    env.reset(seed=0)

    def measure() -> Mapping[str, float]:
        started, steps = time.perf_counter(), 0
        while time.perf_counter() - started < load.seconds:
            env.step(np.int64(0))
            steps += 1
        return {MICROSECONDS: 1e6 * (time.perf_counter() - started) / steps}

    yield measure


@contextlib.contextmanager
def policy_alone(rows: int, layers: int, seconds: float) -> Iterator[Measure]:
    """Measure the policy alone; TensorFlow is called for each batch step."""
    load_tensorflow()
    import tensorflow as tf

    act = tf.function(busy_policy(layers))
    observation, seed = tf.zeros([rows, 4]), tf.zeros([2], tf.int32)
    yield repeating(lambda: act(observation, seed), 1, seconds)


@contextlib.contextmanager
def rolling_out(
    load: Workload, layers: int, horizon: int, num_splits: int
) -> Iterator[Measure]:
    """Measure rollouts with `busy_policy`."""
    load_tensorflow()
    from ppo.in_graph_batch_env import InGraphBatchEnv
    from ppo.simulate import Simulation

    with batch_env(load, num_splits=num_splits) as batch:
        simulation = Simulation(InGraphBatchEnv(batch), busy_policy(layers), horizon)
        yield repeating(lambda: simulation.run((0, 0)), horizon, load.seconds)


def busy_policy(layers: int) -> Any:
    """Return a policy that computes `layers` matrix products per call.

    The duration of each product is proportional to the number of rows.
    """
    import tensorflow as tf

    weights = tf.random.stateless_normal([_WIDTH, _WIDTH], (0, 0)) / _WIDTH**0.5

    def act(observation: Any, seed: Any) -> tuple[Any, Any]:
        del seed
        rows = observation.shape[0]
        features = tf.reshape(tf.repeat(observation[:, :1], 8 * _WIDTH), [-1, _WIDTH])
        for _ in range(layers):
            features = tf.tanh(features @ weights + 0.1)
        # The result is always false, but TensorFlow must compute the products for it.
        is_large = tf.reduce_max(features) > 2.0
        action = tf.fill([rows], tf.cast(is_large, tf.int64))
        return action, tf.zeros([rows])

    return act


def _milliseconds(numbers: Mapping[str, float]) -> float:
    return numbers[MICROSECONDS] / 1e3
