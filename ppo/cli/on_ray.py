"""`ppo train --on ray`: train with learners on the nodes of a Ray cluster.

Learner 0 runs on this host and writes the run folder. If a learner fails, all
learners are restarted from the newest checkpoint.
"""

import contextlib
import json
import logging
import os
import shlex
import socket
import sys
import time
from subprocess import PIPE, STDOUT, TimeoutExpired
from typing import Any, Final

from envserve.cli.program import GivenOptions
from envserve.ray import connect_to_cluster, last_line
from ppo.cli.options import SourceOptions, check_trust
from ppo.cli.run_setup import TF_CONFIG, create_folder
from ppo.cli.seeds import start_training
from ppo.cli.stop_signals import StopSignals
from ppo.errors import ConfigError, LearnerLostError, PpoError
from ppo.run_folder.folder import RunFolder

#: Environment variable that contains the command to resume training on Ray; learner 0
#: prints this command.
RESUME_COMMAND: Final = "PPO_TRAIN_AGAIN"
_PLACEMENT_SECONDS, _STOP_SECONDS, _MAX_FAILURES = 60, 10, 3


def train_on_ray(given: GivenOptions) -> int:
    """Train with several learners; restart all of them if one fails.

    Args:
      given: Arguments of `ppo train`.

    Returns:
      The exit code.

    Raises:
      LearnerLostError: Learners failed three times without a new checkpoint.
    """
    values = given.values
    if "on" not in values:
        raise ConfigError(
            "--learners, --resources: require --on ray; add --on ray, or omit them."
        )
    newest, num_failed = None, 0
    is_restartable, run_dir = "restartable" in values, values.get("run_dir")
    needed = {"on", "learners", "config"}
    if is_restartable:
        needed.add("run_dir")
    excluded = {"seeds", "resume", "distribute", "page"}
    if not needed <= values.keys() or excluded & values.keys():
        raise ConfigError(
            "--on ray: expected CONFIG, --learners N and, with --restartable, "
            "--run-dir DIR. --on ray cannot be combined with --seeds, --resume, "
            "--distribute or --page."
        )
    is_begun = run_dir and os.path.exists(RunFolder(run_dir).config_path)
    existing = run_dir if is_begun else None
    changes = values.get("set_", [])
    options = SourceOptions(
        values.get("connect"), values.get("import_"), "trust" in values
    )
    for resumed in {None, existing}:
        check_trust(values["config"], resumed, changes, options)
    resources = [{"CPU": 1, **values.get("resources", {})}] * values["learners"]
    ray = connect_to_cluster(log_to_driver=False)
    run = RunFolder(run_dir or create_folder(values["config"]))
    words = given.words("on", "learners", "resources", "run_dir", "trust")
    folder = ["--run-dir", str(run.path)]
    words += [*folder, "--distribute", "--restartable", "--trust"]
    resume = ["ppo", *sys.argv[1:], *(folder if run_dir is None else ())]
    try:
        while True:
            try:
                code = _train_once(ray, resources, words, resume)
                return 0 if code == 3 and not is_restartable else code
            except (LearnerLostError, ValueError, ray.exceptions.RayError) as error:
                found, reason = run.checkpoints.glob("[0-9]" * 8), last_line(error)
                previous, newest = newest, max(found, default=None)
                num_failed = num_failed + 1 if newest == previous else 1
                if num_failed == _MAX_FAILURES:
                    raise LearnerLostError(
                        f"Gave up after {_MAX_FAILURES} failures: {reason}; to "
                        f"continue the run, use --run-dir {run.quoted_path}"
                    ) from None
                text = f"Restarting all learners: {reason}"
                if values.get("log_format") == "json":
                    logging.getLogger("ppo").warning(text)
                else:
                    print(text, file=sys.stderr, flush=True)
    finally:
        if run_dir is None:
            run.remove_if_unused()


def _train_once(
    ray: Any, resources: list[dict[str, float]], words: list[str], resume: list[str]
) -> int:
    """Start all learners, wait for learner 0 to exit, and return its exit code.

    Args:
      ray: The module `ray`.
      resources: For each learner, a dict from Ray resources to required amounts.
      words: Arguments of `ppo train`.
      resume: Command that resumes the run, which learner 0 prints.

    Raises:
      LearnerLostError: Learner 0 failed, and a restart may help.
      ray.exceptions.RayError: Another learner or its node failed.
    """
    num, bundles = len(resources), [*resources]
    bundles[0] = {**bundles[0], f"node:{ray.util.get_node_ip_address()}": 0.001}
    group = ray.util.placement_group(bundles, "SPREAD")
    with contextlib.ExitStack() as stack:
        stack.callback(ray.util.remove_placement_group, group)
        if not group.wait(_PLACEMENT_SECONDS):
            free = {k: ray.available_resources().get(k, 0) for k in resources[0]}
            raise PpoError(  # not a ConfigError: resources may become free later
                f"--learners {num}: each learner needs {resources[0]}, and learner 0 "
                f"must run on this host, but the cluster has only {free} free; see "
                "`ray status`, or change --resources."
            )
        at = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        gpus = resources[0].get("GPU", 0)
        rest = {"num_cpus": 0, "num_gpus": gpus, "max_retries": 0}
        on = [ray.remote(scheduling_strategy=at(group, n), **rest) for n in range(num)]
        found = ray.get([on_node(_free_address).remote() for on_node in on])
        addresses = json.dumps(found)
        where = ray.get_runtime_context().gcs_address, os.getcwd()
        extra = [{"TF_CONFIG": TF_CONFIG % (addresses, index)} for index in range(num)]
        others = [on[n](_learn).remote(words, extra[n], *where) for n in range(1, num)]
        stack.callback(ray.wait, others, num_returns=num - 1, timeout=_STOP_SECONDS)
        extra[0][RESUME_COMMAND] = shlex.join(resume)
        first = stack.enter_context(start_training(words, env=os.environ | extra[0]))
        # On an error, kill learner 0: a graceful stop needs the other learners.
        stack.push(lambda e, *_: first.send_signal(15 if e is KeyboardInterrupt else 9))
        stop = stack.enter_context(StopSignals(first.terminate))
        while first.poll() is None:
            with contextlib.suppress(TimeoutExpired):
                first.wait(0.5)
            ray.get(ray.wait(others, num_returns=num - 1, timeout=0)[0])
        if (code := first.returncode) not in (0, 2, 130) and not stop.has_fired():
            raise LearnerLostError(f"learner 0 exited with code {code}")
        return code if code >= 0 else 3


def _free_address() -> str:
    import ray

    with socket.create_server(("", 0)) as free:
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def _learn(words: list[str], extra: dict[str, str], cluster: str, folder: str) -> None:
    """Run a learner on this node until it exits.

    Args:
      words: Arguments of `ppo train`.
      extra: Additional environment variables.
      cluster: Address of the Ray cluster.
      folder: Working directory, if it exists on this node.

    Raises:
      LearnerLostError: The learner failed; the message contains its last output.
    """
    env = os.environ | extra | {"RAY_ADDRESS": cluster}
    cwd = folder if os.path.isdir(folder) else None
    process = start_training(words, env=env, cwd=cwd, stdout=PIPE, stderr=STDOUT)
    output = process.communicate()[0].decode(errors="replace")
    if process.returncode not in (0, 3):
        time.sleep(_STOP_SECONDS / 2)  # let learner 0 report its error first
        raise LearnerLostError(f"exit code {process.returncode}: {last_line(output)}")
