"""Measurement of offline profiles: step times and acceptance, before serving."""
