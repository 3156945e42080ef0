"""Arms: their choice, their words, and proposals without a draft model."""
