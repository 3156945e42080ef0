"""Lengths by batch size as the tables of other engines."""
