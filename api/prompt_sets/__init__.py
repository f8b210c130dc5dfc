"""Prompt sets: built in and uploaded."""
