"""The OpenAI-compatible HTTP front of a worker. It uses the same engine and the same queue as gRPC."""
