"""Errors that say what every rank was doing, what differs between ranks, and what is wrong with a checkpoint."""
