"""The agent: observation preprocessing, networks and action distributions."""
