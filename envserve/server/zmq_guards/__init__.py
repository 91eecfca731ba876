"""What libzmq cannot do for a server: access control and send limits."""
