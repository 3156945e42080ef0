"""Export and import of what was learned, and the tables of other engines."""
