"""Slots: one file holds one iteration of one rank's shard, and can say whether it is whole.

File layout, all integers little-endian::

    0      header page (4096 bytes): where the sections lie, their checksums, and the sequence number
    4096   manifest      JSON, `plan.manifest.Manifest`
           checksums     one u64 (xxh3_64) per manifest item
           lenders       one u32 per manifest item: 0, or 1 + the owner in whose slot its bytes are
           payload       tensor bytes, each item 64-byte aligned
           objects       JSON: everything that is not a tensor, and how the tensors hang together

Commit protocol (one writer, guarded by flock; readers need no lock):

1. `begin()`: sequence := 0. From here on the slot is torn.
2. payload, objects, manifest are written.
3. `commit()`: header fields and header checksum, then sequence := n > 0, last.
   The slot is *complete*: a dying process cannot undo bytes already copied into shared memory.
4. `seal()`: the checksum table and its checksum are filled in. Until then the slot is complete but
   *unsealed*: fine to restore from on this node, never served to another node or exported unsealed.
   Where the checksums are known before step 3 they are written before it (`write_tables`).

What ranks of a node hold alike is copied by one of them. The slots of the others *borrow* it: they have its checksum
and name the lender, whose slot of the same iteration on the same node has the bytes. A borrowing slot is as good as
that one, and is made whole (`memory.settle`) before anybody restores from it, serves or exports it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from gemini_run.errors import MemoryFull, ReplicaCorrupt
from gemini_run.memory.header import (
    BORROWED_AT,
    FLAG_HOLD,
    FLAGS,
    FLAGS_AT,
    HEADER_BYTES,
    SEALED_AT,
    SEQUENCE_AT,
    U32,
    U64,
    SlotHeader,
    nonzero,
)
from gemini_run.memory.pages import populate
from gemini_run.plan.manifest import Manifest


class Slot:
    """A slot file, mapped. Open one per file and keep it: never close it under a live tensor.

    Attributes:
        view: the whole mapping, writable unless opened read-only.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        """Map an existing slot file.

        Raises:
            FileNotFoundError: there is none.
            ReplicaCorrupt: the file is shorter than a header.
        """
        self.path = path
        descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            self.capacity = os.fstat(descriptor).st_size
            if self.capacity < HEADER_BYTES:
                raise ReplicaCorrupt(f"{path}: truncated slot ({self.capacity} bytes)")
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            self._map = mmap.mmap(descriptor, self.capacity, flags=mmap.MAP_SHARED, prot=protection)
            # Page faults are per mapping and cost several times the copy itself: take them here, at once. MAP_POPULATE
            # would do so with the GIL held, a third of a second for each GB.
            if writable and not populate(ctypes.addressof(ctypes.c_char.from_buffer(self._map)), self.capacity):
                self._map.close()
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._map = mmap.mmap(descriptor, self.capacity, flags=flags, prot=protection)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self.view = memoryview(self._map)
        self._sequence = self._read_u64(SEQUENCE_AT)

    @classmethod
    def create(cls, path: Path, capacity: int) -> Slot:
        """Make (or replace) the slot file with room for `capacity` bytes, all of it backed by memory.

        Raises:
            MemoryFull: the file system has not so much room; nothing is left behind.
            OSError: anything else, such as a missing directory.
        """
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        capacity = max(1, -(-capacity // 4096)) * 4096
        _remove_abandoned(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Allocated, not sparse: a full file system is an error here and never a SIGBUS later.
            os.posix_fallocate(descriptor, 0, capacity)
        except OSError as error:
            os.close(descriptor)
            temporary.unlink()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            free = free_bytes(path.parent)
            raise MemoryFull(
                f"host memory full: a slot of {capacity / 2**20:.1f} MiB is needed, {free / 2**20:.1f} MiB "
                f"are free in {path.parent}: enlarge it (mount -o remount,size=... /dev/shm; docker "
                "--shm-size; a Kubernetes emptyDir with medium: Memory) or name another tmpfs with "
                f"--memory-dir [{error}]",
                needed_bytes=capacity,
                free_bytes=free,
            ) from error
        os.close(descriptor)
        os.replace(temporary, path)
        return cls(path, writable=True)

    # --- header -----------------------------------------------------------------------------------

    def header(self) -> SlotHeader:
        """The header as it is now. Raises: as SlotHeader.unpack, naming the file."""
        try:
            header = SlotHeader.unpack(bytes(self.view[:HEADER_BYTES]))
        except ReplicaCorrupt as error:
            raise type(error)(f"{self.path}: {error}") from error
        if header.complete and header.end > self.capacity:
            raise ReplicaCorrupt(f"{self.path}: truncated slot ({self.capacity} of {header.end} bytes)")
        return header

    def begin(self) -> None:
        """The slot is torn from now on until `commit`."""
        self._write_u64(SEQUENCE_AT, 0)

    def commit(self, header: SlotHeader) -> None:
        """Write `header`, then the sequence number, last: the slot is complete."""
        sequence = self._sequence = max(self._sequence, self._read_u64(SEQUENCE_AT)) + 1
        page = dataclasses.replace(header, sequence=0).pack()
        self.view[: len(page)] = page
        self._write_u64(SEQUENCE_AT, sequence)

    def refuse(self) -> None:
        """Mark the slot torn for good: nobody will restore from it."""
        self.begin()

    def header_hold(self) -> bool:
        """Whether a complete slot is held for the durable tier, read without parsing the header."""
        flags: int = FLAGS.unpack_from(self._map, FLAGS_AT)[0]
        return bool(flags & FLAG_HOLD) and self._read_u64(SEQUENCE_AT) > 0

    def set_hold(self, hold: bool) -> None:
        FLAGS.pack_into(self._map, FLAGS_AT, FLAG_HOLD if hold else 0)

    # --- sections ---------------------------------------------------------------------------------

    def manifest(self, header: SlotHeader) -> Manifest:
        """Raises: ReplicaCorrupt if it fails its checksum, FormatVersionError for an unknown version."""
        return header.checked_manifest(self._section(header.manifest_offset, header.manifest_length), self.path)

    def objects(self, header: SlotHeader) -> bytes:
        """Raises: ReplicaCorrupt if it fails its checksum."""
        return header.checked_objects(self._section(header.objects_offset, header.objects_length), self.path)

    def payload(self, header: SlotHeader) -> memoryview:
        return self._section(header.payload_offset, header.payload_length)

    def item_checksums(self, manifest: Manifest, header: SlotHeader) -> list[int]:
        """xxh3_64 of every item's bytes as they are now, in manifest order."""
        payload = self.payload(header)
        return [xxhash.xxh3_64_intdigest(payload[i.offset : i.offset + i.length]) for i in manifest.items]

    def stored_checksums(self, header: SlotHeader) -> list[int]:
        """The checksum table. Raises: ReplicaCorrupt if it fails its own checksum."""
        return header.checked_table(self._section(header.checksums_offset, U64.size * header.num_items), self.path)

    def seal(self, manifest: Manifest, header: SlotHeader) -> None:
        """Fill in the checksum table from the payload as it is now, then mark the slot sealed."""
        sealed = self._write_checksums(header, self.item_checksums(manifest, header)).sealed
        self._write_u64(SEALED_AT, sealed)

    def lenders(self, header: SlotHeader) -> list[int]:
        """Of every item the owner of the slot that has its bytes, -1 = they are here. Raises: ReplicaCorrupt."""
        if not header.borrowed:
            return [-1] * header.num_items
        table = self._section(header.checksums_offset + U64.size * header.num_items, U32.size * header.num_items)
        if nonzero(xxhash.xxh3_64_intdigest(table)) != header.borrowed:
            raise ReplicaCorrupt(f"{self.path}: the table of lenders fails its checksum")
        return [value - 1 for (value,) in U32.iter_unpack(table)]

    def write_tables(self, header: SlotHeader, checksums: Sequence[int], lenders: Sequence[int] = ()) -> SlotHeader:
        """Write the tables of a slot that is not committed yet; returns the header to commit: sealed.

        Args:
            checksums: of every item, in manifest order.
            lenders: as `lenders` returns them; empty if every byte is here.
        """
        return self.write_lenders(self._write_checksums(header, checksums), lenders)

    def write_lenders(self, header: SlotHeader, lenders: Sequence[int]) -> SlotHeader:
        """Of a slot that is not committed yet; returns the header to commit."""
        if all(lender < 0 for lender in lenders):
            return dataclasses.replace(header, borrowed=0)
        table = b"".join(U32.pack(lender + 1) for lender in lenders)
        start = header.checksums_offset + U64.size * header.num_items
        self.view[start : start + len(table)] = table
        return dataclasses.replace(header, borrowed=nonzero(xxhash.xxh3_64_intdigest(table)))

    def filled(self) -> None:
        """Every byte is here now."""
        self._write_u64(BORROWED_AT, 0)

    def _write_checksums(self, header: SlotHeader, checksums: Sequence[int]) -> SlotHeader:
        table = b"".join(map(U64.pack, checksums))
        self.view[header.checksums_offset : header.checksums_offset + len(table)] = table
        return dataclasses.replace(header, sealed=nonzero(xxhash.xxh3_64_intdigest(table)))

    def verify(
        self, header: SlotHeader | None = None, *, borrowing: bool = False, payload: bool = True
    ) -> tuple[SlotHeader, Manifest]:
        """Check everything there is to check, every byte of a sealed payload included.

        Args:
            borrowing: accept a slot that borrows; what it borrows is not checked.
            payload: check the tensors' bytes, too.

        Raises:
            ReplicaCorrupt: torn, truncated, or a checksum fails; the message names the tensor.
        """
        header = header or self.header()
        if not header.complete:
            raise ReplicaCorrupt(f"{self.path}: torn slot (its writer died before the commit)")
        manifest = self.manifest(header)
        self.objects(header)
        lenders = self.lenders(header)
        if header.borrowed and not borrowing:
            raise ReplicaCorrupt(f"{self.path}: {sum(lender >= 0 for lender in lenders)} tensors are in other slots")
        if header.sealed and payload:
            self.verify_items(manifest, header, [i for i, lender in enumerate(lenders) if lender < 0])
        return header, manifest

    def verify_items(self, manifest: Manifest, header: SlotHeader, which: Iterable[int]) -> None:
        """Check the bytes of these items (indices in the manifest) of a sealed slot. Raises: ReplicaCorrupt."""
        stored = self.stored_checksums(header)
        payload = self.payload(header)
        for index in which:
            item = manifest.items[index]
            if xxhash.xxh3_64_intdigest(payload[item.offset : item.offset + item.length]) != stored[index]:
                raise ReplicaCorrupt(f"{self.path}: tensor {item.name!r} fails its checksum")

    def close(self) -> None:
        """Unmap, and drop the lock. Where a view or tensor over the mapping lives on, it is unmapped when that goes."""
        with contextlib.suppress(BufferError):
            self.view.release()
            self._map.close()
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def try_lock(self, *, shared: bool = False) -> bool:
        """Take the file's flock without waiting: exclusive for a writer, shared to keep writers away."""
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _section(self, offset: int, length: int) -> memoryview:
        if offset + length > self.capacity:
            raise ReplicaCorrupt(f"{self.path}: truncated slot")
        return self.view[offset : offset + length]

    def _read_u64(self, at: int) -> int:
        value: int = U64.unpack_from(self._map, at)[0]
        return value

    def _write_u64(self, at: int, value: int) -> None:
        U64.pack_into(self._map, at, value)


def set_file_hold(path: Path, iteration: int, hold: bool) -> bool:
    """Set or clear FLAG_HOLD of the complete slot at `path` without mapping it.

    Returns: False, with nothing changed, if the file does not (any more) hold `iteration`.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        header = SlotHeader.unpack(os.pread(descriptor, HEADER_BYTES, 0))
        if not header.complete or header.iteration != iteration:
            return False
        os.pwrite(descriptor, FLAGS.pack(FLAG_HOLD if hold else 0), FLAGS_AT)
        return True
    except ReplicaCorrupt:
        return False
    finally:
        os.close(descriptor)


def _remove_abandoned(path: Path) -> None:
    """Remove what a process that died inside `Slot.create` of `path` left: it would hold its memory for good."""
    for file in path.parent.glob(f".{path.name}.*.new"):
        pid = file.name.split(".")[-2]
        if pid.isdigit() and not Path("/proc", pid).exists():
            file.unlink(missing_ok=True)


def free_bytes(directory: Path) -> int:
    """Bytes that an ordinary user can still allocate in the file system of `directory`."""
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize
