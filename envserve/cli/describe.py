"""`envserve describe`: print the spaces, arguments and speed of an env."""

from __future__ import annotations

import itertools

from envserve.cli.options import Env, Import, Insecure, MaybeAddress, import_from_here
from envserve.cli.terminal import console
from envserve.envs.user_envs import name_and_imports


def describe(
    env: Env,
    address: MaybeAddress = None,
    *,
    import_: Import = (),
    insecure: Insecure = False,
) -> None:
    """Show an env's spaces, render modes, time limit, arguments and steps per second.

    The time limit and the arguments are shown only if the env runs on this host.

    Args:
      env: Env to describe: a registered name, FILE.py:CLASS or MODULE:NAME.
      address: Address of a server that offers the env; by default, run it on this host.
    """
    from gymnasium.vector.utils import batch_space
    from rich.table import Table

    from envserve.bench.interleaved import time_each
    from envserve.client import BatchEnv
    from envserve.client.vector_env import metadata_of
    from envserve.envs.registry import import_env_modules
    from envserve.text import one_line

    registered: dict[str, object] = {}
    if address is None:
        import_from_here(import_, env)
        name, modules = name_and_imports(env, import_)
        batch = BatchEnv.local(name, 1, 1, import_modules=modules, max_restarts=1)
    else:
        batch = BatchEnv.connect(env, [address], 1, insecure=insecure)
    with batch:
        if address is None:
            # These imports cannot exit this process: `BatchEnv.local` has imported
            # the modules in a child process, and raises an error if it exits.
            import_env_modules(modules)
            registered = _registration(batch.spec.env_name)
        modes = metadata_of(batch).get("render_modes", ())
        batch.reset()
        actions = itertools.repeat(batch_space(batch.action_space, 1).sample())
        batch.step(next(actions))  # may compile, or wait for a simulator to start
        seconds = time_each(batch.step, actions, 0.5)
    table = Table.grid(padding=(0, 2))
    for name, value in {
        "observation": batch.observation_space,
        "action": batch.action_space,
        "render modes": ", ".join(map(str, modes)),
        "steps/s": f"{len(seconds) / seconds.sum():,.0f} of one env in a worker",
        **registered,
    }.items():
        table.add_row(name, one_line(" ".join(str(value or "-").split()), 1000))
    console().print(table, markup=False)


def _registration(name: str) -> dict[str, object]:
    from envserve.envs.registry import env_creator_of, find_spec, parameters_of

    spec = find_spec(name)
    parameters = parameters_of(env_creator_of(spec)) or {}
    values = [(p, spec.kwargs.get(p.name, p.default)) for p in parameters.values()]
    texts = (str(p.replace(annotation=p.empty, default=value)) for p, value in values)
    return {"time limit": spec.max_episode_steps, "arguments": ", ".join(texts)}
