"""Addresses, TLS and tokens: what controller and worker have in common on the network. Imports nothing of ours."""
