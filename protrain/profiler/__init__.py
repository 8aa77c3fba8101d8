"""Finds a model's blocks and traces one training step of it."""
