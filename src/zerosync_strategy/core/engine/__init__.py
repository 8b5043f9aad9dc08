"""The boundary to DeepSpeed and torch: what of their internals is used, replaced or overridden, and by whom.

No other file of the package touches an internal, but that ``attached/overrides.py`` has the methods that it overrides.
``contract`` and ``torch_internals`` list what is used and check it, ``patches`` lists what is replaced in the whole
process, ``interpose`` puts our methods before those of one object.
``zero*``, ``param*`` and ``gathering`` are accessors by noun; ``compat``, ``compilation`` and ``cpu`` do what
DeepSpeed does not do by itself.
"""
