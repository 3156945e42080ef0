"""What `scripts/gpu_check` runs on a machine with a GPU."""
