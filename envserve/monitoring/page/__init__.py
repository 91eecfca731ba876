"""A page in the browser about servers, their envs and a run."""
