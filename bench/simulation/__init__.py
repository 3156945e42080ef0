"""Policies against simulated machines and traffic."""
