"""The web page that shows servers, their envs and a training run."""
