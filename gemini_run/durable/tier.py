"""The durable tier's contract: named objects at one location, written whole or not at all."""

from __future__ import annotations

import abc
import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from gemini_run.errors import ConfigError, DurableError

PROBE_NAME = "gemini-run-probe"  #: written, read and deleted by `DurableTier.preflight`


class ObjectMissing(DurableError):
    """There is no object of that name."""


class Source:
    """Bytes to be stored, as pieces that lie anywhere in memory; nothing is copied to make one.

    A source can be read again from any offset, so a broken transfer goes on where it stopped. The memory
    behind the pieces must not change or vanish until `close`.
    """

    def __init__(self, pieces: Iterable[bytes | memoryview]) -> None:
        self._pieces = [memoryview(piece).cast("B") for piece in pieces]
        self._starts: list[int] = []
        self.size = 0  #: bytes
        for piece in self._pieces:
            self._starts.append(self.size)
            self.size += len(piece)

    def views(self, offset: int = 0, length: int | None = None) -> Iterator[memoryview]:
        """The bytes from `offset` on, `length` of them (default: to the end), in order, without copying."""
        end = self.size if length is None else min(self.size, offset + length)
        at = max(0, bisect.bisect_right(self._starts, offset) - 1)
        while offset < end:
            start, piece = self._starts[at], self._pieces[at]
            view = piece[offset - start : end - start]
            if view:
                yield view
            offset += len(view)
            at += 1

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(self.views(offset, length))

    def close(self) -> None:
        """Let the memory behind the pieces go. The source is empty afterwards."""
        for piece in self._pieces:
            piece.release()
        self._pieces, self._starts, self.size = [], [], 0


class DurableTier(abc.ABC):
    """Objects below one location. Names are relative, ``/``-separated.

    All methods may be called from any thread. Every method raises DurableError, in one line that names the
    location, when the storage fails for good; passing trouble (throttling, a lost connection) is retried
    inside with growing pauses until `patience` is used up or `cancel` is called.

    Attributes:
        location: as the user gave it.
        patience: seconds for which one transfer may go without any progress.
    """

    location: str
    patience: float = 60.0

    def __init__(self) -> None:
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make every transfer in flight, and each later one, fail soon. For shutting down."""
        self._cancelled.set()

    @abc.abstractmethod
    def preflight(self) -> None:
        """Write, read and delete a probe. Raises: DurableError saying what is wrong and the remedy."""

    @abc.abstractmethod
    def put_file(self, name: str, source: Source, stop: threading.Event | None = None) -> None:
        """Store `source` under `name`, replacing what was there. Readers see all of it or none.

        Once this returns the bytes outlive a crash of this machine (as far as the storage promises).
        `stop` ends the transfer early, with a DurableError.
        """

    def put_bytes(self, name: str, data: bytes) -> None:
        """`put_file` for a small object."""
        self.put_file(name, Source([data]))

    @abc.abstractmethod
    def get_bytes(self, name: str) -> bytes:
        """The whole object. Raises: ObjectMissing."""

    @abc.abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the object's bytes at `offset`. Raises: ObjectMissing; DurableError if short."""

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`. Raises: as `read_into`."""
        buffer = bytearray(length)
        self.read_into(name, offset, memoryview(buffer))
        return bytes(buffer)

    @abc.abstractmethod
    def list(self, prefix: str = "") -> dict[str, int]:
        """Name -> size of every object whose name starts with `prefix`. Unfinished ones are not objects."""

    @abc.abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Remove objects, in the order given; those that are missing already are fine."""

    @abc.abstractmethod
    def clean(self, prefix: str) -> None:
        """Remove what cut-off transfers of names that start with `prefix` left. None may be in flight."""

    def _check(self, stop: threading.Event | None = None) -> None:
        if self._cancelled.is_set() or (stop is not None and stop.is_set()):
            raise DurableError(f"{self.location}: the transfer was stopped")


def open_tier(location: str) -> DurableTier:
    """The tier at `location`: ``s3://bucket[/prefix]``, else a directory. Touches nothing yet.

    Raises: ConfigError for a location that cannot be one.
    """
    if location.startswith("s3://"):
        from gemini_run.durable.s3 import S3Tier  # boto3 costs half a second: only for those who use it

        return S3Tier.at(location)
    scheme, separator, _ = location.partition("://")
    if separator and scheme != "file":
        raise ConfigError(f"--durable {location}: give s3://bucket/prefix or a directory")
    from gemini_run.durable.filesystem import FilesystemTier

    path = location.removeprefix("file://")
    if not path:
        raise ConfigError("--durable: the directory's name is empty")
    return FilesystemTier(path)


def run_parallel(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Run `jobs` on a few daemon threads; the first error is raised, after which no further job is begun.

    Daemon threads, because an interpreter that is ending must not wait for a slow server.
    """
    if threads <= 1 or len(jobs) <= 1:
        for job in jobs:
            job()
        return
    pending = iter(jobs)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            with lock:
                job = next(pending, None)
            if job is None:
                return
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - a thread's top: carried to the caller
                errors.append(error)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(jobs)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
