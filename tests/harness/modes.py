"""The base of dispatch modes that see every operator of a rank."""

from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A mode whose own code Dynamo may look at, as it finds nothing there to compile.

    By default torch keeps Dynamo out of it on each call. Where every operator of a rank is one, a tenth of the time
    goes there.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
