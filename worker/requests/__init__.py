"""Requests of callers, and each output in the making."""
