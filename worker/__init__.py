"""Runs batched speculative decoding and reports every step."""
