"""Saving: changes collected and committed with their marks, and the way back at start."""
