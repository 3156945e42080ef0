"""What is learned from steps, and which length is chosen: no I/O, no clock, no gRPC."""
