"""The engine: continuous batching of sequences, and the speculative steps that advance them."""
