"""Environment servers for reinforcement learning.

The names below are imported on first use. Python runs this file before any other module
of the package, and worker processes must not import zmq or asyncio.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from envserve.client import BatchEnv
    from envserve.client.make_vec import make, make_vec
    from envserve.envs.context import env_context

    __version__: str

__all__ = ["BatchEnv", "env_context", "make", "make_vec"]

_HOMES = {
    "BatchEnv": "envserve.client",
    "env_context": "envserve.envs.context",
    "make": "envserve.client.make_vec",
    "make_vec": "envserve.client.make_vec",
}


def __getattr__(name: str) -> object:
    import importlib.metadata

    if name == "__version__":
        return importlib.metadata.version("envserve")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
