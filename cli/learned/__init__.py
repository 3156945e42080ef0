"""Verbs that show what was learned: tables, top, explain."""
