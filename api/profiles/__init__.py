"""Rényi profiles: how much each reward can be told apart at each noise level."""
