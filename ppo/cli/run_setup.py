"""Plan the run of `ppo train`: new or resumed, its config, and its env source."""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from envserve.envs.user_envs import check_files_exist, env_name_of
from envserve.host_resources import num_cores
from ppo.cli.options import (
    SourceOptions,
    find_user_code,
    preserved_interrupts,
    resolve_env_source,
    resumed_config,
    user_code_of,
    with_absolute_paths,
)
from ppo.cli.progress import Screen
from ppo.config.config import Config
from ppo.config.named_configs import (
    CONFIG_FORMS,
    CONFIGS,
    apply_settings,
    expected_result,
    is_env,
    load_config,
    recommended_settings,
    with_algorithm,
)
from ppo.errors import ConfigError
from ppo.run_folder.folder import RunFolder
from ppo.run_folder.trust import EnvSource, is_trusted, trust_code
from ppo.spaces import check_spaces

#: TF_CONFIG of a learner, without the JSON list of all addresses and the index.
TF_CONFIG = '{"cluster": {"worker": %s}, "task": {"type": "worker", "index": %d}}'


class RunPlan(NamedTuple):
    """A planned run: its folder, its config, and the source of its envs."""

    run_folder: RunFolder
    config: Config
    origin: str
    """Text that names the source of the settings in messages, such as "of cartpole"."""
    env_source: EnvSource
    earlier_config: Config | None = None
    """Config before the changes of this command, if the run is resumed."""
    learners: Any = None
    """Learners of the run, once they are connected."""
    remark: str = ""
    """Line to print about settings of CONFIG that a resumed run does not use."""

    @property
    def is_resumed(self) -> bool:
        """Whether the run continues an earlier one."""
        return self.earlier_config is not None

    def decay_warning(self, steps: int) -> str:
        """Return a warning if extending the run increases settings that decay to 0.

        Return an empty string if no setting increases. `steps` is the number of env
        steps so far.
        """
        config, earlier = self.config, self.earlier_config or self.config
        is_decaying = {
            "learning_rate": config.learning_rate_schedule == "linear",
            "clip_range": config.decay_clip_range,
            "entropy_coefficient": config.decay_entropy_coefficient,
        }
        names = ", ".join(name for name in is_decaying if is_decaying[name])
        is_longer = config.planned_steps > earlier.planned_steps
        if not names or not is_longer or config.algorithm != "ppo":
            return ""
        before, now = (
            max(0.0, 1 - steps / each.planned_steps) for each in (earlier, config)
        )
        return (
            f"The run is longer now, so settings that decay to 0 increase from "
            f"{100 * before:.0f} % to {100 * now:.0f} % of their initial values: "
            f"{names}."
        )

    def header(self, num_workers: int | None) -> list[str]:
        """Return the lines that describe the run when it starts."""
        config = self.config
        workers = min(num_workers or num_cores(), config.num_envs)
        where = f"in {workers} local worker process{'es' if workers > 1 else ''}"
        if self.env_source.addresses:
            where = f"on {', '.join(self.env_source.addresses)}"
        steps = f"{config.planned_steps:,}"
        if config.planned_steps < config.total_steps:
            steps += f": whole iterations of {config.steps_per_iteration:,}"
            steps += f" within {config.total_steps:,}"
        lines = [
            f"{env_name_of(config.env_name)}, settings {self.origin}",
            f"  envs   {config.num_envs} {where}",
            f"  steps  {steps}",
            f"  seed   {config.seed}",
            f"  run    {self.run_folder.path}",
        ]
        mean_return, duration = expected_result(config)
        if mean_return and not self.is_resumed:
            text = f"about {mean_return}, after about {duration} on one core"
            lines.append(f"  expect a mean return of {text}")
        if _has_no_time_limit(config):
            lines.append(
                "  limit  none; evaluations cut episodes off after "
                f"{config.evaluation_time_limit:,} steps"
            )
        return lines


def _has_no_time_limit(config: Config) -> bool:
    """Return whether neither the registered env nor a wrapper has a time limit."""
    import gymnasium

    spec = gymnasium.registry.get(config.env_name)
    if spec is None or any(table["name"] == "TimeLimit" for table in config.wrappers):
        return False
    # As in `gymnasium.make`, the argument replaces the registered limit; -1 removes it.
    limit = config.env_kwargs.get("max_episode_steps") or spec.max_episode_steps
    return limit in (None, -1)


def read_tf_config(seeds: int | None, resume: Path | None) -> tuple[list[str], int]:
    """Read the addresses of all learners and this learner's index from TF_CONFIG.

    `seeds` and `resume` are options of the command, which are checked as well.
    """
    text = os.environ.get("TF_CONFIG")
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        values = json.loads(text or "")
        ((job, addresses),) = values["cluster"].items()
        task, index = values["task"]["type"], values["task"]["index"]
        is_valid = type(index) is int and all(
            re.fullmatch(r".+:\d+", address)
            and 0 < int(address.rpartition(":")[2]) < 1 << 16
            for address in addresses
        )
        if is_valid and len(set(addresses)) < len(addresses):
            duplicate = next(x for x in addresses if addresses.count(x) > 1)
            raise ConfigError(
                f"--distribute: TF_CONFIG lists the address {duplicate} twice; give "
                "each worker its own host and port."
            )
        if is_valid and job == task == "worker" and index in range(len(addresses)):
            if seeds is None and (index == 0 or resume is None):
                return addresses, index
            raise ConfigError(
                "--distribute cannot be combined with --seeds. Only the learner with "
                "index 0 takes --resume; start the others without it."
            )
    example = TF_CONFIG % ('["host0:2222", "host1:2222"]', 0)
    raise ConfigError(
        f"--distribute: expected a TF_CONFIG like {example}, got {text!r}; set it for "
        "each learner, with the same workers and consecutive indices from 0."
    )


def plan_resumed_run(
    path: Path, name: str | None, changes: list[str], options: SourceOptions
) -> RunPlan:
    """Plan the continuation of a run that was checked with `check_trust`."""
    run_folder, earlier = RunFolder.read(path)
    if name is not None:
        named = with_algorithm(load_config(name), changes)
        for key in ("env_name",) if is_env(name) else ("env_name", "algorithm"):
            value = getattr(earlier, key)
            if env_name_of(getattr(named, key)) != env_name_of(value):
                raise ConfigError(
                    f"--resume uses the config of the earlier run, whose "
                    f"{key.removesuffix('_name')} is {value}; omit CONFIG, and use "
                    "--set to change a setting."
                )
    source = resolve_env_source(run_folder.env_source(), options, earlier)
    config = with_absolute_paths(resumed_config(earlier, changes))
    config = options.with_moved_files(config)
    config.check_algorithm()
    find_user_code(config, source)
    remark = ""
    if name is not None and not is_env(name):
        named = options.with_moved_files(with_absolute_paths(named))
        remark = _differences(name, named, config, changes)
    return RunPlan(run_folder, config, "of the run", source, earlier, remark=remark)


def _differences(name: str, named: Config, config: Config, changes: list[str]) -> str:
    """Return a line that lists settings of a resumed run that differ from CONFIG.

    Return an empty string if there are none. The seed, the env's file and the settings
    in `changes` are not compared.
    """
    values, run_values = named.all_settings, config.all_settings
    excluded = {"env_name", "seed"}
    excluded.update(change.partition("=")[0] for change in changes)
    texts = [
        f"{key} = {json.dumps(run_values[key])} (not {json.dumps(values.get(key))})"
        for key in run_values
        if key not in excluded
        and _as_text(run_values[key]) != _as_text(values.get(key))
    ]
    if not texts:
        return ""
    return (
        f"The run keeps its settings, which differ from {name}: {', '.join(texts)}. "
        "Use --set to change them."
    )


def _as_text(value: Any) -> str:
    """Return a value as JSON; equal numbers have equal texts.

    `--set` stores settings of user algorithms as text.
    """
    text = value if isinstance(value, str) else json.dumps(value)
    with contextlib.suppress(ValueError):
        return str(float(text))
    return text


def save_env_source(plan: RunPlan) -> None:
    """If a run is resumed, save its env source, and record that its code is trusted.

    Call this after the user has agreed to use the code. The changed config is saved
    later, after the checkpoint has been loaded with it. If the config before the
    changes was trusted, it remains trusted with the new env source.
    """
    run, source, earlier = plan.run_folder, plan.env_source, plan.earlier_config
    if earlier is None:
        return
    was_trusted = is_trusted(earlier, run.env_source(), run.path)
    run.save_env_source(source)
    trust_code(plan.config, source, run.path)
    if was_trusted:
        trust_code(earlier, source, run.path)


def plan_new_run(
    screen: Screen,
    name: str | None,
    changes: list[str],
    run_dir: Path | None,
    source: EnvSource,
    runs: list[RunFolder],
    *,
    film: bool,
) -> RunPlan:
    """Plan a new run, create its folder, and append the folder to `runs`.

    Start an env to read its spaces, and to check that it can be stepped and, with
    `film`, rendered. An env without a named config gets settings that suit its spaces.
    """
    if name is None:
        raise ConfigError(f"Expected {CONFIG_FORMS}.")
    base = with_algorithm(load_config(name), changes)
    config = with_absolute_paths(apply_settings(base, changes))
    config.check_algorithm()
    check_files_exist(user_code_of(config))
    find_user_code(config, source)
    screen.phase(f"starting {env_name_of(config.env_name)}", is_transient=True)
    from ppo.environments import env_maker, first_step
    from ppo.evaluation.rendering import (
        prepare_filming,
        render_frame,
        rendering_env_maker,
    )

    single = config.replace(num_splits=1, spare_envs=False)
    make_env = env_maker(single, source.addresses, 1, source.import_modules)
    if film:
        prepare_filming(config, source.addresses)
        make_env = rendering_env_maker(single, source.addresses, source.import_modules)
    with make_env(num_envs=1, seed=0) as env:
        spaces = env.observation_space, env.action_space
        if ":" not in config.algorithm:  # a user's algorithm may support more spaces
            check_spaces(config.algorithm, *spaces)
        if first_step(env) and film:
            render_frame(env)
    origin = f"of {name}"
    if is_env(name):
        names = [name for name in CONFIGS if CONFIGS[name] == base]
        origin = f"of {names[0]}" if names else f"for {base.algorithm}"
        if not names and base.algorithm == "ppo":
            origin = "suited to its spaces"
            base = base.replace(**recommended_settings(*spaces))
            config = with_absolute_paths(apply_settings(base, changes))
    # An interrupt must not leave a new folder that `runs` does not contain.
    with preserved_interrupts(is_deferred=True):
        path = run_dir or create_folder(name)
        runs.append(RunFolder.create(path, config, source))
    return RunPlan(runs[-1], config, origin, source)


def create_folder(name: str) -> Path:
    """Create a new folder `runs/CONFIG-TIME` that no other run uses."""
    stem = re.sub(r"\.(toml|json|py)$", "", re.split("[/:]", name)[-1])
    first = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        path = first.with_name(first.name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # another run started in the same second
            continue
        except OSError:  # `RunFolder.create` reports the reason
            pass
        break
    return path
