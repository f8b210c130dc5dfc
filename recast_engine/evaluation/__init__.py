"""Evaluation: subjects drawn on the same prompts and seeds, compared in pairs and reported in words."""
