"""The measured comparison of learned arms with the baseline: trials, verdicts, and what follows from them."""
