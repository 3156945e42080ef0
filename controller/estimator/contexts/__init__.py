"""Contexts: what workers that are alike share, and how a group of their reports is learned from."""
