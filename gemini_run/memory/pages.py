"""Pages of memory, made before they are written to: to be stopped at each of them costs more than the copy into it."""

from __future__ import annotations

import ctypes

_MADV_POPULATE_WRITE = 23
_PAGE = 4096


def populate(address: int, length: int) -> bool:
    """Have the kernel make all whole pages of this memory at once. Other threads run meanwhile: the GIL is released.

    Huge pages would be fewer, and took three times as long to be made where memory is in pieces.

    Returns: False for an old kernel (before 5.14), which makes them one by one as they are written.
    """
    start = -(-address // _PAGE) * _PAGE
    size = (address + length) // _PAGE * _PAGE - start
    if size <= 0:
        return True
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE)
