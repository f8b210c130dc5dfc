"""Trained adapters and their download."""
