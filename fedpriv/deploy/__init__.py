"""Deployments on this machine: start, follow and stop the processes of a real one, with TLS and keys."""
