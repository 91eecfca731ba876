"""Run Gymnasium envs in worker processes or on env servers, and survive their crashes.

`make_vec` and `make` are used like those of Gymnasium. `BatchEnv` also steps groups of
rows independently, and reports why a row is invalid.

>>> import envserve
>>> envs = envserve.make_vec("CartPole-v1", num_envs=8)  # or addresses=["sim1"]
>>> observations, infos = envs.reset(seed=0)
>>> observations, rewards, *_ = envs.step(envs.action_space.sample())
>>> envs.close()

`envserve start` serves envs to other hosts; `envserve --help` lists all commands.
"""

# The names below are imported on first use, because Python runs this file before any
# other module of the package, and worker processes must not import zmq or asyncio.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from envserve.client import BatchEnv
    from envserve.client.make_vec import make, make_vec
    from envserve.envs.context import env_context

    __version__: str

__all__ = ["BatchEnv", "env_context", "make", "make_vec"]

_MODULES = {
    "BatchEnv": "envserve.client",
    "env_context": "envserve.envs.context",
    "make": "envserve.client.make_vec",
    "make_vec": "envserve.client.make_vec",
}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> object:
    import importlib.metadata

    if name == "__version__":
        return importlib.metadata.version("envserve")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
