"""Keys of clients and servers, and the files that contain them. No networking."""
