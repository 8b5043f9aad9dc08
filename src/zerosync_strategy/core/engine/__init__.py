"""The boundary to DeepSpeed and torch: what of their internals is used, replaced or overridden, and by whom.

No other file of the package touches an internal, but that ``attached/overrides.py`` has the methods that it overrides.
``contract`` and ``torch_internals`` list and check what is used, ``patches`` what is replaced in the whole process.
``zero*``, ``param*`` and ``gathering`` are accessors by noun.
"""
