"""Where a run's envs come from: workers of this host, or env servers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from envserve.client import BatchEnv
from envserve.client.link.discovery import resolve
from envserve.client.link.server_pool import live_servers
from envserve.errors import AddressError
from envserve.settings import Autoreset
from ppo.config.config import Config
from ppo.errors import ConfigError

_Wrappers = tuple[Mapping[str, Any], ...]


class MakeEnv(Protocol):
    """Gives a new batch of envs of one task."""

    def __call__(
        self, *, num_envs: int, seed: int, is_training: bool = False
    ) -> BatchEnv:
        """Start or connect to `num_envs` envs, seeded from `seed`.

        Only those of a training are staggered or cut short, if the config says so.
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
    """Return a function that starts or reaches the envs of a config.

    Args:
        config: names the env, and what goes with it.
        addresses: env servers, such as sim1 or tcp://sim1:5555; with none, envs run in
            worker processes of this host.
        num_workers: local worker processes; by default one per core.
        import_modules: modules that register envs or wrappers, for local workers.
        autoreset: when an ended episode's env is reset; rollouts need "same_step".
        first_env_index: of a training, where its rows stand among those of all
            learners; their seeds follow from that.

    Raises:
        ConfigError: there are more servers than envs.
        envserve.errors.AddressError: nobody knows the host of an address, or fewer
            servers than `min_servers` have one.
    """
    servers = [address for word in addresses or () for address in resolve(word)]
    count = max(len(servers), config.num_servers)
    if config.num_envs < count:
        raise ConfigError(
            f"num_envs: expected at least one env per server, got {config.num_envs} "
            f"for {count} servers; leave servers out."
        )
    if config.min_servers > len(servers):
        raise AddressError(
            f"min_servers: expected at most {len(servers)}, the servers that have an "
            f"address now; got {config.min_servers}; ask for fewer, or name more "
            "servers."
        )

    def make_env(*, num_envs: int, seed: int, is_training: bool = False) -> BatchEnv:
        options: dict[str, Any] = {
            "num_envs": num_envs,
            "num_splits": config.num_splits,
            "seed": seed,
            "env_kwargs": dict(config.env_kwargs),
            "wrappers": _training_wrappers(config) if is_training else config.wrappers,
            "autoreset": autoreset,
            "spare_envs": config.spare_envs,
            "on_fault": config.on_fault,
            "padding_after": config.padding_after_seconds,
            "first_env_index": first_env_index if is_training else 0,
        }
        if not servers:
            return BatchEnv.local(
                config.env_name,
                num_workers=num_workers,
                import_modules=(*config.import_modules, *(import_modules or ())),
                step_timeout=config.step_timeout_seconds,
                reset_timeout=config.reset_timeout_seconds,
                max_restarts=config.max_restarts,
                **options,
            )
        words = list(addresses or ())
        if is_training:
            options |= {"num_servers": count, "min_servers": config.min_servers or None}
        else:  # it may have fewer rows, and is over before more servers come
            words = live_servers(words, insecure=config.insecure)[:num_envs]
        return BatchEnv.connect(
            config.env_name,
            words,
            server_lost_after=config.server_lost_after_seconds,
            on_server_lost=config.on_server_lost,
            insecure=config.insecure,
            **options,
        )

    return make_env


def _training_wrappers(config: Config) -> _Wrappers:
    """Return the wrappers of a training, whose episodes may be cut short.

    To stagger them stands right around what limits the env, whose steps are counted.
    """
    wrappers = config.wrappers
    if limit := config.training_time_limit:
        wrappers = (*wrappers, {"name": "TimeLimit", "max_episode_steps": limit})
    if not config.stagger_episodes:
        return wrappers
    limits = [n for n, table in enumerate(wrappers, 1) if table["name"] == "TimeLimit"]
    place = max(limits, default=0)
    return (*wrappers[:place], {"name": "StaggerEpisodes"}, *wrappers[place:])
