"""The agent: preprocessing, networks, action distributions."""
