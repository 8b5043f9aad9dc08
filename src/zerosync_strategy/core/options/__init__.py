"""The options of ZeroSync, and what a program gives beside them."""
