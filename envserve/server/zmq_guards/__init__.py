"""What libzmq cannot do for a server: bound, close and identify its connections."""
