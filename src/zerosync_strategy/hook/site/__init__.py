"""At run time a folder of ``sys.path``, not a package; it is one for type checkers."""
