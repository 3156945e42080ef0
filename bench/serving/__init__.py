"""Serving real traffic under every policy."""
