"""What runs in worker processes: `process` steps envs, forked off by `template`.

Nothing here loads zmq or asyncio.
"""

__all__: list[str] = []
