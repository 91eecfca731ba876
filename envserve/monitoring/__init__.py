"""Watch servers and envs: status, health, metrics, frames, the web page."""
