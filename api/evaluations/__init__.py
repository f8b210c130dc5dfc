"""Comparisons of adapters and base models."""
