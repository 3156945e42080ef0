"""Requests of callers, and the sequences that are generated for them."""
