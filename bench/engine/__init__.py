"""Single steps of the engine, beside transformers' generation."""
