"""The costs of a batch on many servers for the trainer that steps it."""
