"""Decisions explained and repeated, and the paper's fitted model."""
