"""For type checkers. At run time this folder is a place in ``sys.path``, not a package."""
