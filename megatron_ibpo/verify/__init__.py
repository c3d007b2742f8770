"""Checks of whether a run computes what it claims, on its own model, data and settings (docs/verify.md)."""
