"""Other projects' own test suites on ZeroSync; README.md has how to run them, and what was found."""
