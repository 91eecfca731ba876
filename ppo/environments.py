"""Create the envs of a run: in local worker processes, or on env servers."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gymnasium.vector.utils import batch_space

from envserve.client import BatchEnv
from envserve.client.link.discovery import resolve
from envserve.client.link.server_pool import live_servers
from envserve.errors import AddressError, EnvStartError, EnvTimeout
from envserve.settings import Autoreset
from ppo.config.config import Config
from ppo.errors import ConfigError

__all__ = ["env_maker"]

MASK_KEY = "action_mask"
"""Key of the action mask in the outermost Dict of an observation.

As in PettingZoo, the mask has one flag per action, which is 1 if the action is allowed.
For MultiDiscrete, the flags of all choices are concatenated, as in SB3-contrib, or are
a Tuple with an array per choice, as for `MultiDiscrete.sample`."""

#: Maximum number of attempts of `first_step`, because some resets or steps may fail.
_MAX_FIRST_STEPS = 100
#: Settings that add wrappers to the training envs.
_WRAPPING_SETTINGS = ("training_time_limit", "stagger_episodes")


class MakeEnv(Protocol):
    """A function that creates a new batch of envs for one task."""

    def __call__(
        self, *, num_envs: int, seed: int, is_training: bool = False
    ) -> BatchEnv:
        """Start or connect to a batch of envs.

        Args:
          num_envs: Number of envs.
          seed: Seed from which the seeds of all envs are derived.
          is_training: Whether `stagger_episodes`, `training_time_limit` and
            `min_servers` of the config apply.
        """


def env_maker(
    config: Config,
    addresses: Sequence[str] | None = None,
    num_workers: int | None = None,
    import_modules: Sequence[str] | None = None,
    *,
    autoreset: Autoreset = "same_step",
    first_env_index: int = 0,
) -> MakeEnv:
    """Return a function that creates the envs for a config.

    Args:
      config: The config; it names the env, its wrappers and its timeouts.
      addresses: Env servers, such as sim1 or tcp://sim1:5555. Without addresses, the
        envs run in worker processes on this host.
      num_workers: Number of local worker processes; one per core by default.
      import_modules: Modules that register envs or wrappers; local workers import
        them.
      autoreset: When an env is reset after an episode; rollouts need "same_step".
      first_env_index: Index of the first training env among the envs of all learners.
        The seeds of the envs depend on it.

    Raises:
      ConfigError: There are more servers than envs.
      envserve.errors.AddressError: The host of an address cannot be resolved, or
        fewer servers than `min_servers` were found.
    """
    servers = [server for address in addresses or () for server in resolve(address)]
    count = max(len(servers), config.num_servers)
    if config.num_envs < count:
        raise ConfigError(
            f"num_envs: expected at least one env per server, got {config.num_envs} "
            f"for {count} servers; use fewer servers or more envs."
        )
    if config.min_servers > len(servers):
        raise AddressError(
            f"min_servers: expected at most {len(servers)}, the number of servers that "
            f"have an address now, got {config.min_servers}; reduce it, or pass more "
            "addresses."
        )

    def make_batch(num_envs: int, seed: int, is_training: bool) -> BatchEnv:
        options: dict[str, Any] = {
            "num_envs": num_envs,
            "num_splits": config.num_splits,
            "seed": seed,
            "env_kwargs": dict(config.env_kwargs),
            "wrappers": _training_wrappers(config) if is_training else config.wrappers,
            "autoreset": autoreset,
            "spare_envs": config.spare_envs,
            "on_fault": config.on_fault,
            "nonfinite": config.nonfinite,
            "padding_after": config.padding_after_seconds,
            "first_env_index": first_env_index if is_training else 0,
        }
        if not servers:
            return BatchEnv.local(
                config.env_name,
                num_workers=num_workers,
                import_modules=(*config.import_modules, *(import_modules or ())),
                preload=config.preload,
                step_timeout=config.step_timeout_seconds,
                reset_timeout=config.reset_timeout_seconds,
                max_restarts=config.max_restarts,
                **options,
            )
        connect_to = list(addresses or ())
        if is_training:
            options |= {"num_servers": count, "min_servers": config.min_servers or None}
        else:
            # An evaluation may have fewer envs than there are servers, and it is too
            # short to wait for servers that are not available yet.
            connect_to = live_servers(connect_to, insecure=config.insecure)[:num_envs]
        return BatchEnv.connect(
            config.env_name,
            connect_to,
            server_lost_after=config.server_lost_after_seconds,
            operation_timeout=config.operation_timeout_seconds,
            on_server_lost=config.on_server_lost,
            insecure=config.insecure,
            **options,
        )

    def make_env(*, num_envs: int, seed: int, is_training: bool = False) -> BatchEnv:
        try:
            return make_batch(num_envs, seed, is_training)
        except EnvStartError as error:  # such as a vector env, which has no wrappers
            names = [name for name in _WRAPPING_SETTINGS if getattr(config, name)]
            if is_training and names and "do not support wrappers" in str(error):
                error.add_note(
                    f"The training envs have wrappers because of {', '.join(names)}; "
                    "remove these settings if the envs do not support wrappers."
                )
            raise

    return make_env


def first_step(env: BatchEnv, max_seconds: float = 10.0) -> bool:
    """Reset a new env and step it with a random action; return whether it was stepped.

    If the reset or the step fails, try again. Return False if the env takes longer than
    `max_seconds`, or if it masks actions.

    Args:
      env: Batch of one env.
      max_seconds: Maximum time to wait for the reset and the step.

    Raises:
      envserve.errors.EnvError: Every reset or every step fails.
    """
    has_mask = MASK_KEY in getattr(env.observation_space, "spaces", ())
    deadline = time.monotonic() + max_seconds
    try:
        for _ in range(_MAX_FIRST_STEPS):
            env.send_reset()
            env.recv_reset(deadline - time.monotonic())
            if has_mask or env.action_space.dtype is None:
                break
            env.send(batch_space(env.action_space, 1).sample())
            if env.recv(timeout=deadline - time.monotonic())[1].valid.all():
                return True
    except EnvTimeout:  # training has its own timeouts, which may be longer
        pass
    return False


def _training_wrappers(config: Config) -> tuple[Mapping[str, Any], ...]:
    """Return the wrappers of the config, and those of its training-only settings.

    `StaggerEpisodes` wraps the outermost `TimeLimit`, from which it reads the limit.
    """
    wrappers = config.wrappers
    if limit := config.training_time_limit:
        wrappers = (*wrappers, {"name": "TimeLimit", "max_episode_steps": limit})
    if not config.stagger_episodes:
        return wrappers
    limits = [n for n, table in enumerate(wrappers, 1) if table["name"] == "TimeLimit"]
    index = max(limits, default=0)
    return (*wrappers[:index], {"name": "StaggerEpisodes"}, *wrappers[index:])
