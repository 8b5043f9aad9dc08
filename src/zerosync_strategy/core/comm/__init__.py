"""Streams, collectives and the count of what they send."""
