"""What libzmq cannot do for a client: name lookup, byte limits, error causes."""
