"""The version, of the package, and of what it writes into reports and checkpoints."""

__version__ = "0.4.0"
