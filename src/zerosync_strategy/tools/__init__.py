"""The tools beside training: ``zerosync plan``, ``zerosync doctor`` and the race checker.

They use ``core``. Neither ``core`` nor a framework's layer imports them.
"""
