"""Offline profiles as documents: measured, analysed, shown, handed on."""
