"""The options of ZeroSync, and options that were removed."""
