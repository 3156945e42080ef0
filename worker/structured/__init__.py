"""Grammars of structured output: their source, their trial, and the masks that follow them."""
