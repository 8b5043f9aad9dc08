"""Tools outside of training: ``zerosync plan`` and ``zerosync doctor``.

They use ``core``. Neither ``core`` nor the layer of a framework imports them.
"""
