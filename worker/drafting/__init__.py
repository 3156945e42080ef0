"""Where draft tokens come from, per batch size: plans, and copying from a row's own text or past outputs."""
