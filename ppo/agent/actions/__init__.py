"""What a policy does: kinds of action spaces and masks, distributions."""
