"""`ppo train --on ray`: learners on the nodes of a Ray cluster, the first one here."""

import contextlib
import json
import os
import shlex
import socket
import sys
import time
from subprocess import PIPE, STDOUT, TimeoutExpired
from typing import Any, Final

from envserve.cli.program import Given
from envserve.ray import connected, last_line
from ppo.cli.run_setup import new_folder
from ppo.cli.seeds import started
from ppo.cli.stop_signals import StopSignals
from ppo.errors import ConfigError, LearnerLostError, PpoError
from ppo.run_folder.folder import RunFolder

_TOLD: Final = '{"cluster": {"worker": %s}, "task": {"type": "worker", "index": %d}}'
AGAIN: Final = "PPO_TRAIN_AGAIN"  # tells the first by which command all go on
_ROOM_SECONDS, _END_SECONDS, _TRIES = 60, 10, 3


def train_on_ray(given: Given) -> int:
    """Train with learners that are all placed again if one fails; return exit code.

    Args:
      given: What `ppo train` was given.
    """
    values, newest, num_failed = given.values, None, 0
    is_restartable, run_dir = "restartable" in values, values.get("run_dir")
    needed = {"on", "learners", "config", *["run_dir"] * is_restartable}
    refused = {"seeds", "resume", "distribute", "page"}
    if not needed <= values.keys() or refused & values.keys():
        raise ConfigError(
            "--on ray: expected CONFIG and --learners N, with --restartable also "
            "--run-dir DIR, and no --seeds, --resume, --distribute or --page."
        )
    needs = [{"CPU": 1, **values.get("resources", {})}] * values["learners"]
    ray = connected(log_to_driver=False)
    run = RunFolder(run_dir or new_folder(values["config"]))
    words = given.words("on", "learners", "resources", "run_dir")
    place = ["--run-dir", str(run.path)]
    words += [*place, "--distribute", "--restartable"]
    again = ["ppo", *sys.argv[1:], *(place if run_dir is None else ())]
    try:
        while True:
            try:
                code = _round(ray, needs, words, again)
                return 0 if code == 3 and not is_restartable else code
            except (LearnerLostError, ValueError, ray.exceptions.RayError) as error:
                found, why = run.checkpoints.glob("[0-9]" * 8), last_line(error)
                known, newest = newest, max(found, default=None)
                num_failed = num_failed + 1 if newest == known else 1
                if num_failed == _TRIES:
                    raise LearnerLostError(
                        f"Gave up after {_TRIES} failures: {why}; to continue the run, "
                        f"use --run-dir {run.quoted_path}"
                    ) from None
                print(f"Restarting all learners: {why}", file=sys.stderr, flush=True)
    finally:
        if run_dir is None:
            run.remove_if_unused()


def _round(
    ray: Any, needs: list[dict[str, float]], words: list[str], again: list[str]
) -> int:
    """Have all learn; returns how the first has ended if that is how the run has."""
    num, here = len(needs), {f"node:{ray.util.get_node_ip_address()}": 0.001}
    group = ray.util.placement_group([needs[0] | here, *needs[1:]], "SPREAD")
    with contextlib.ExitStack() as at_end:
        at_end.callback(ray.util.remove_placement_group, group)
        if not group.wait(_ROOM_SECONDS):
            free = {name: ray.available_resources().get(name, 0) for name in needs[0]}
            raise PpoError(  # there may be, at another time
                f"--learners {num}: expected {needs[0]} for each, the first on this "
                f"host; found {free} free in the cluster (ray status, --resources)."
            )
        at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        rest = {"num_cpus": 0, "num_gpus": needs[0].get("GPU", 0), "max_retries": 0}
        on = [ray.remote(scheduling_strategy=at(group, n), **rest) for n in range(num)]
        addresses = json.dumps(ray.get([each(_address).remote() for each in on]))
        place = ray.get_runtime_context().gcs_address, os.getcwd()
        told = [{"TF_CONFIG": _TOLD % (addresses, index)} for index in range(num)]
        others = [on[n](_train).remote(words, told[n], *place) for n in range(1, num)]
        at_end.callback(ray.wait, others, num_returns=num - 1, timeout=_END_SECONDS)
        told[0][AGAIN] = shlex.join(again)
        first = at_end.enter_context(started(words, env=os.environ | told[0]))
        # Without the others it cannot stop as it would, or not soon.
        at_end.push(
            lambda e, *_: first.send_signal(15 if e is KeyboardInterrupt else 9)
        )
        stop = at_end.enter_context(StopSignals(first.terminate))
        while first.poll() is None:
            with contextlib.suppress(TimeoutExpired):
                first.wait(0.5)
            ray.get(ray.wait(others, num_returns=num - 1, timeout=0)[0])
        if (code := first.returncode) not in (0, 2, 130) and not stop.has_fired():
            raise LearnerLostError(f"learner 0 has ended with exit code {code}")
        return code if code >= 0 else 3


def _address() -> str:
    import ray

    with socket.create_server(("", 0)) as free:
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _train(words: list[str], told: dict[str, str], cluster: str, folder: str) -> None:
    """Learn on this node; raises `LearnerLostError` with what was said last."""
    known = os.environ | told | {"RAY_ADDRESS": cluster}
    here = folder if os.path.isdir(folder) else None
    process = started(words, env=known, cwd=here, stdout=PIPE, stderr=STDOUT)
    said = process.communicate()[0].decode(errors="replace")
    if process.returncode not in (0, 3):
        time.sleep(_END_SECONDS / 2)  # the first one may say it, too
        raise LearnerLostError(f"exit code {process.returncode}: {last_line(said)}")
