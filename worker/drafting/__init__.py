"""Arms: who selects them, their words, and proposals without a draft model."""
