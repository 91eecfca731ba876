"""Monitor servers and envs: status, health, metrics, rendered frames, the web page."""
