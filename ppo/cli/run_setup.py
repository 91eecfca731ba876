"""What `ppo train` is to do: a new run or an old one, of which env, and where."""

import contextlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

from envserve.envs.user_envs import env_name_of, with_absolute_path
from envserve.host_resources import num_cores
from ppo.cli.options import place_of
from ppo.cli.progress import Screen
from ppo.config.config import Config
from ppo.config.named_configs import (
    CONFIG_FORMS,
    CONFIGS,
    apply_settings,
    is_env,
    load_config,
    recommended_settings,
)
from ppo.errors import ConfigError
from ppo.run_folder.folder import EnvSource, RunFolder

_CLUSTER = (
    '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)


class Plan(NamedTuple):
    """What is to run, where its config comes from, and where it all is."""

    run_folder: RunFolder
    config: Config
    origin: str
    place: EnvSource
    earlier: Config | None = None
    """What the run has had until now, if it is resumed."""
    learners: Any = None
    """Those of the run, once they have met."""

    @property
    def is_resumed(self) -> bool:
        """Whether the run has begun before."""
        return self.earlier is not None

    def leap(self, steps: int) -> str:
        """Say what falls over the run, and leaps up as it gets longer; or nothing."""
        config, earlier = self.config, self.earlier or self.config
        falling = {
            "learning_rate": config.learning_rate_schedule == "linear",
            "clip_range": config.decay_clip_range,
            "entropy_coefficient": config.decay_entropy_coefficient,
        }
        names = ", ".join(name for name, falls in falling.items() if falls)
        if not names or config.planned_steps <= earlier.planned_steps:
            return ""
        before, now = (1 - steps / each.planned_steps for each in (earlier, config))
        return (
            f"The run is longer now: what falls to 0 by its end leaps from "
            f"{100 * before:.0f} % to {100 * now:.0f} % of its first value: {names}."
        )

    def header(self, num_workers: int | None) -> list[str]:
        """Say in lines what will be done, and where."""
        config = self.config
        workers = min(num_workers or num_cores(), config.num_envs)
        where = f"in {workers} worker process{'es' if workers > 1 else ''} here"
        if self.place.addresses:
            where = f"on {', '.join(self.place.addresses)}"
        steps = f"{config.planned_steps:,}"
        if config.planned_steps < config.total_steps:
            steps += f": whole iterations of {config.steps_per_iteration:,}"
            steps += f" within {config.total_steps:,}"
        return [
            f"{env_name_of(config.env_name)}, settings {self.origin}",
            f"  envs   {config.num_envs} {where}",
            f"  steps  {steps}",
            f"  seed   {config.seed}",
            f"  run    {self.run_folder.path}",
        ]


def cluster(seeds: int | None, resume: Path | None) -> tuple[list[str], int]:
    """Return the learners that TF_CONFIG names, HOST:PORT, and which one this is."""
    text = os.environ.get("TF_CONFIG")
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        told = json.loads(text or "")
        ((job, addresses),) = told["cluster"].items()
        task, index = told["task"]["type"], told["task"]["index"]
        is_fine = all(re.fullmatch(r".+:\d+", address) for address in addresses)
        if is_fine and job == task == "worker" and index in range(len(addresses)):
            if seeds is None and (index == 0 or resume is None):
                return addresses, index
            raise ConfigError(
                "--distribute: leave out --seeds; --resume is for the learner of index "
                "0, others are started as at first."
            )
    raise ConfigError(
        f"--distribute: expected a TF_CONFIG such as {_CLUSTER}, got {text!r}; set it "
        "for each learner, with the same workers, and an index of its own from 0 on."
    )


def resumed_plan(
    path: Path,
    name: str | None,
    changes: list[str],
    connect: list[str] | None,
    import_modules: list[str] | None,
) -> Plan:
    """Find out how a run goes on, and remember where."""
    run_folder, earlier = RunFolder.open(path)
    env_name = env_name_of(earlier.env_name)
    if name is not None and env_name_of(load_config(name).env_name) != env_name:
        raise ConfigError(
            f"--resume takes the config from the earlier run, whose env is "
            f"{earlier.env_name}: leave out CONFIG; use --set to change a setting."
        )
    place = place_of(run_folder.env_source(), connect, import_modules)
    config = apply_settings(earlier, changes)
    run_folder.save_env_source(place)
    return Plan(run_folder, config, "of the run", place, earlier)


def new_plan(
    screen: Screen,
    name: str | None,
    changes: list[str],
    run_dir: Path | None,
    place: EnvSource,
) -> Plan:
    """Find out what to run, look at its env, and then make a folder."""
    if name is None:
        raise ConfigError(f"Expected {CONFIG_FORMS}.")
    base = load_config(name)
    config = _located(apply_settings(base, changes))
    screen.phase(f"looking at {env_name_of(config.env_name)}", is_passing=True)
    from ppo.environments import env_maker

    whole = config.replace(num_splits=1)
    make_env = env_maker(whole, place.addresses, 1, place.import_modules)
    with make_env(num_envs=1, seed=0) as env:
        spaces = env.observation_space, env.action_space
    origin = f"of {name}"
    if is_env(name):
        known = [word for word in CONFIGS if CONFIGS[word] == base]
        origin = f"of {known[0]}" if known else "suited to its spaces"
        if not known:
            base = base.replace(**recommended_settings(*spaces))
            config = _located(apply_settings(base, changes))
    run_folder = RunFolder.create(run_dir or new_folder(name), config, place)
    return Plan(run_folder, config, origin, place)


def new_folder(name: str) -> Path:
    """Make a folder named after config and time, which no other run takes, too."""
    stem = re.sub(r"\.(toml|json|py)$", "", re.split("[/:]", name)[-1])
    first = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for end in ("", *(f"-{number}" for number in range(2, 100))):
        path = first.with_name(first.name + end)
        try:
            path.mkdir(parents=True)
        except FileExistsError:  # of the same second
            continue
        except OSError:  # `RunFolder.create` says why
            pass
        break
    return path


def _located(config: Config) -> Config:
    """Return a config whose files are found from any folder."""
    return config.replace(
        env_name=with_absolute_path(config.env_name),
        import_modules=tuple(map(with_absolute_path, config.import_modules)),
    )
