"""Offline profiles: step times and acceptance, measured before serving."""
