"""Passes of a model over rows: keys and values, attention, recorded graphs."""
