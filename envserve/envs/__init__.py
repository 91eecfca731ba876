"""Registered envs, user envs from files and modules, and env seeds."""
