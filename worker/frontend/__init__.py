"""Front of a worker: admission queues, the engine on an event loop, the gRPC service, metrics, and the process."""
