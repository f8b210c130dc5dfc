"""Allocation matrices: how much of each reward acts at each step."""
