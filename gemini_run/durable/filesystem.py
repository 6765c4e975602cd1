"""The durable tier in a directory (a shared file system, or a disk that outlives the job)."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from gemini_run.durable.tier import PROBE_NAME, DurableTier, ObjectMissing, Source
from gemini_run.errors import DurableError

CHUNK_BYTES = 16 << 20
_PART_SUFFIX = ".gemini-part"  #: a file on its way; never listed


class FilesystemTier(DurableTier):
    """Objects are files; each is written beside its place, synced, and renamed into it."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self.location = directory
        self.root = Path(directory).absolute()

    def preflight(self) -> None:
        name, data = f"{PROBE_NAME}-{secrets.token_hex(4)}", b"gemini-run"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.put_bytes(name, data)
            if self.get_bytes(name) != data:
                raise DurableError(f"durable tier {self.location}: a probe read back differs from what was written")
            self.delete([name])
        except (OSError, DurableError) as error:
            cause = error.strerror if isinstance(error, OSError) else str(error)
            raise DurableError(
                f"durable tier {self.location}: the directory cannot be used ({cause}): "
                "create it, make it writable for this user, or name another with --durable"
            ) from error

    def put_file(self, name: str, source: Source, stop: threading.Event | None = None) -> None:
        path = self.root / name
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PART_SUFFIX}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                offset = 0
                while offset < source.size:
                    self._check(stop)
                    for view in source.views(offset, CHUNK_BYTES):
                        while view:
                            written = os.write(descriptor, view)
                            offset += written
                            view = view[written:]
                # Bytes first, then the name, then the directory: a power cut leaves the old file or the new.
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(part, path)
            _sync_directory(path.parent)
        except OSError as error:
            raise self._error(f"cannot write {name}", error) from error
        finally:
            with contextlib.suppress(OSError):  # gone if all went well
                part.unlink()

    def get_bytes(self, name: str) -> bytes:
        try:
            return (self.root / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ObjectMissing(f"{self.location}: there is no {name}") from error
        except OSError as error:
            raise self._error(f"cannot read {name}", error) from error

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        try:
            descriptor = os.open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self.location}: there is no {name}") from error
        except OSError as error:
            raise self._error(f"cannot read {name}", error) from error
        try:
            done = 0
            while done < len(buffer):
                self._check()
                count = os.preadv(descriptor, [buffer[done : done + CHUNK_BYTES]], offset + done)
                if not count:
                    raise DurableError(f"{self.location}: {name} is truncated (no byte at {offset + done})")
                done += count
        except OSError as error:
            raise self._error(f"cannot read {name}", error) from error
        finally:
            os.close(descriptor)

    def list(self, prefix: str = "") -> dict[str, int]:
        found: dict[str, int] = {}
        for name in self._walk(prefix):
            if not name.endswith(_PART_SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # pruned by someone meanwhile
                    found[name] = (self.root / name).stat().st_size
        return dict(sorted(found.items()))

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.root / name
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self._error(f"cannot delete {name}", error) from error
            self._drop_empty(path.parent)

    def clean(self, prefix: str) -> None:
        for name in list(self._walk(prefix)):
            if name.endswith(_PART_SUFFIX):
                with contextlib.suppress(OSError):  # only space: the next cleaning tries again
                    (self.root / name).unlink()
                self._drop_empty((self.root / name).parent)

    def _walk(self, prefix: str) -> Iterator[str]:
        """Names of files that start with `prefix`. Folders that cannot hold one are not entered: the
        user's directory may hold a great deal besides."""
        for folder, below, files in os.walk(self.root):
            here = Path(folder).relative_to(self.root).as_posix()
            base = "" if here == "." else f"{here}/"
            below[:] = [b for b in below if _meet(f"{base}{b}/", prefix)]
            yield from (base + file for file in files if (base + file).startswith(prefix))

    def _drop_empty(self, folder: Path) -> None:
        if folder != self.root:
            with contextlib.suppress(OSError):  # not empty, or gone: both are fine
                folder.rmdir()

    def _error(self, what: str, error: OSError) -> DurableError:
        return DurableError(f"durable tier {self.location}: {what}: {error.strerror or error}")


def _meet(folder: str, prefix: str) -> bool:
    return folder.startswith(prefix) or prefix.startswith(folder)


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
