"""The cryptographic keys of clients and servers, and the files that store them."""
