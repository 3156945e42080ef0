"""Choice of tokens: distributions, noise, grammars, and the acceptance of drafts."""
