"""Other projects' own test suites on ZeroSync; docs/compatibility.md has how to run them, and what was found."""
