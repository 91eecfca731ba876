"""The env server: one asyncio event loop, and one pool of workers per lease."""

from envserve.server.serve import serve

__all__ = ["serve"]
