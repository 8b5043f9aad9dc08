"""Checkpoints: which files belong to one save, whether they are whole, and how the ranks agree on it."""
