"""What callers ask for, and each output in the making."""
