"""Proposals without a draft model, and arms by batch size in words."""
