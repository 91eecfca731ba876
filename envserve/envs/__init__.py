"""Where envs come from: the registry, user envs, seeds."""
