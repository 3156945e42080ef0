"""Policies compared on the same traffic: the plan, the runs, statistics, tables, pictures."""
