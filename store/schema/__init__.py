"""The schema: the steps that lead to it, and how they are applied."""
