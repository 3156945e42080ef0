"""Forward passes on torch, on any device; on a GPU they are captured as CUDA graphs."""
