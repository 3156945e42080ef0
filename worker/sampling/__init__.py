"""Choosing tokens: probabilities, noise, and what of a draft is accepted."""
