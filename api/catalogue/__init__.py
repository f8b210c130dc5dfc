"""Base models and rewards that this installation knows."""
