"""The boundary to DeepSpeed and torch: which of their internals are used, replaced or overridden, and where.

No other file of the package touches an internal, except ``attached/overrides.py``, which has the overriding methods.
``contract`` and ``torch_internals`` list and check what is used, ``patches`` lists what is replaced in the process.
``zero*``, ``param*`` and ``gathering`` are accessors, one file per noun.
"""
