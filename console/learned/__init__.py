"""Learned state: as a document that moves between fleets, and as tables for people."""
