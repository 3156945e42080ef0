"""Passes on torch: on any device, and on a GPU recorded as CUDA graphs."""
