"""The OpenAI-compatible HTTP front of a worker: the same engine and the same queue as over gRPC."""
