"""The env server: an asyncio loop over one pool of workers per lease."""

from envserve.server.serve import serve

__all__ = ["serve"]
