"""Rewards: one scorer per file behind ``base.Reward``; ``catalogue`` lists them without torch."""
