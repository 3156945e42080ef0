"""Conversions between messages, records and rows, and the one validation of what arrives."""
