"""What a run leaves on disk: its config, checkpoints and metrics."""
