"""A deployment on this machine: the processes that a real one has, with TLS and keys, started, followed and stopped."""
