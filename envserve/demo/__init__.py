"""Envs that learn before one's eyes, while one does to them what one likes."""
