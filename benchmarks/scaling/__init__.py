"""What a large batch costs the process that steps it."""
