"""Single steps of the engine."""
