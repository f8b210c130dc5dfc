"""Revisions, applied in order."""
