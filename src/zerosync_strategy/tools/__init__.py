"""The tools beside training: ``zerosync plan`` and ``zerosync doctor``.

They use ``core``. Neither ``core`` nor a framework's layer imports them.
"""
