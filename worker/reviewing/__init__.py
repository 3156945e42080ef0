"""What every plan would have made of an output that has ended."""
