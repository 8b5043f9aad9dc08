"""Memory of this process in huge pages: a fork has their tables to copy, which takes longer than what most ranks do."""

import ctypes
import re
from pathlib import Path

_SIZE = 2 << 20
_MADV_COLLAPSE = 25  # since Linux 6.1; where it cannot be had, memory stays as it is
_ANONYMOUS = re.compile(r"(\w+)-(\w+) rw-p 0+ 00:00 0\s*(?:\[heap\])?$", re.MULTILINE)


def use_huge_pages() -> None:
    """Put what is in memory by now into huge pages. A fork that writes to one copies the part that it writes to."""
    libc = ctypes.CDLL(None)
    for match in _ANONYMOUS.finditer(Path("/proc/self/maps").read_text()):
        first, last = (int(address, 16) for address in match.groups())
        start, end = -(-first // _SIZE) * _SIZE, last // _SIZE * _SIZE
        if start < end:
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_COLLAPSE)
