"""The env server: an asyncio front over one pool of workers per lease."""

from envserve.server.config import ServerConfig
from envserve.server.serve import serve

__all__ = ["ServerConfig", "serve"]
