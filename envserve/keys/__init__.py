"""Keys of clients and servers, as files of a folder. No sockets."""
