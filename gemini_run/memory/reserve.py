"""Small files in a node's memory (notes, beacons) must fit however full the file system is: a little room is kept back.

Without it the first restart after somebody else has filled /dev/shm would end the job, and a page of a mapped file that
cannot be allocated is a SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from gemini_run.errors import MemoryFull
from gemini_run.journal import write_json_atomic
from gemini_run.wire import MemoryPaths

RESERVE_BYTES = 256 * 1024
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)
Made = TypeVar("Made")


def keep_back(paths: MemoryPaths) -> None:
    """Allocate the reserve. Raises: MemoryFull."""
    descriptor = os.open(paths.reserve, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _full(paths, error) from error
    finally:
        os.close(descriptor)


def with_reserve(paths: MemoryPaths, act: Callable[[], Made]) -> Made:
    """`act()`; where the file system is full, again with the reserve's pages to use.

    Raises: MemoryFull if that does not do either.
    """
    with contextlib.ExitStack() as stack:
        for last in (False, True):
            try:
                return act()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if last:
                    raise _full(paths, error) from error
            stack.enter_context(_given_up(paths))
    raise AssertionError("the second attempt returns or raises")


def write_json(paths: MemoryPaths, path: Any, value: Any) -> None:
    """Replace the file `path` of this memory, as `write_json_atomic`. Raises: MemoryFull."""
    with_reserve(paths, lambda: write_json_atomic(path, value))


@contextlib.contextmanager
def _given_up(paths: MemoryPaths) -> Iterator[None]:
    """Nothing is kept back meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(paths.reserve, 0)
    try:
        yield
    finally:
        with contextlib.suppress(MemoryFull):  # it has gone for good into what was written: there is less next time
            keep_back(paths)


def _full(paths: MemoryPaths, error: OSError) -> MemoryFull:
    stats = os.statvfs(paths.root)
    free = stats.f_bavail * stats.f_frsize
    return MemoryFull(
        f"host memory full: {free / 2**10:.0f} KiB are free in {paths.root}, not enough even for the node's notes: "
        f"make room there, or name another tmpfs with --memory-dir [{error.strerror}]",
        needed_bytes=RESERVE_BYTES,
        free_bytes=free,
    )
