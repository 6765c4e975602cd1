"""What lies where in the durable tier, and the formats of the files that are not DCP's.

::

    <location>/it-<10 digits>/
        __<node rank>_<k>.distcp   tensors, each once             } a plain checkpoint of
        .metadata                  what lies where, for DCP       } torch.distributed.checkpoint
        index.json                 what lies where, for gemini-run: raw bytes of each entry
        rank-<r>.json              rank r's slot without its payload, and which entry holds which item
        gemini.json                the commit marker, written LAST: without it the iteration does not exist
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from gemini_run.errors import FormatVersionError, ReplicaCorrupt

FORMAT_VERSION = 1
MARKER = "gemini.json"
INDEX = "index.json"
ITERATION_PREFIX = "it-"
_FOLDER = re.compile(r"it-(\d{10})/(.+)")


def folder(iteration: int) -> str:
    """``it-<10 digits>/``"""
    return f"{ITERATION_PREFIX}{iteration:010d}/"


def rank_file(rank: int) -> str:
    return f"rank-{rank}.json"


def split(name: str) -> tuple[int, str] | None:
    """(iteration, file name) of an object's name, None for what is not ours."""
    match = _FOLDER.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where one entry is stored: the archive at `offset`, and the tensor's raw bytes at `raw_offset`.

    Offsets and lengths in bytes from the start of the file.
    """

    file: str
    offset: int
    length: int
    raw_offset: int
    raw_length: int


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """`size` in bytes; `xxh3`: xxh3_64 of the whole file, 16 hex digits."""

    size: int
    xxh3: str


@dataclasses.dataclass(frozen=True)
class Marker:
    """The commit marker.

    Attributes:
        iteration: iterations finished in this state.
        world_size: ranks of the job that wrote it.
        created_at: unix seconds.
        run_id: of the run that wrote it.
        files: name -> facts, of every other file of the iteration.
    """

    iteration: int
    world_size: int
    created_at: float
    run_id: str
    files: dict[str, StoredFile]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def to_json(self) -> bytes:
        return json.dumps({"version": FORMAT_VERSION, **dataclasses.asdict(self)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Marker:
        """Raises: FormatVersionError for an unknown version, ReplicaCorrupt for what is no marker."""
        body = _body(text, MARKER)
        try:
            files = {str(n): StoredFile(int(f["size"]), str(f["xxh3"])) for n, f in body["files"].items()}
            return cls(body["iteration"], body["world_size"], body["created_at"], body["run_id"], files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReplicaCorrupt(f"unreadable {MARKER}: {error!r}") from error


def index_json(iteration: int, places: list[tuple[str, Place]]) -> bytes:
    """`places`: (tensor's name, where it is) of every entry, in order."""
    entries = [[name, *dataclasses.astuple(place)] for name, place in places]
    return json.dumps({"version": FORMAT_VERSION, "iteration": iteration, "entries": entries}).encode()


def read_index(text: bytes) -> list[Place]:
    """Raises: FormatVersionError, ReplicaCorrupt."""
    try:
        return [Place(*entry[1:]) for entry in _body(text, INDEX)["entries"]]
    except (KeyError, TypeError) as error:
        raise ReplicaCorrupt(f"unreadable {INDEX}: {error!r}") from error


@dataclasses.dataclass(frozen=True)
class RankRecord:
    """A rank's slot without its payload: manifest and objects to the byte.

    Attributes:
        checksums: xxh3_64 per item.
        entries: per item the index of the entry that holds its bytes, None where it has no bytes.
    """

    rank: int
    world_size: int
    iteration: int
    round: int
    manifest: bytes
    objects: bytes
    checksums: list[int]
    entries: list[int | None]

    def to_json(self) -> bytes:
        body = dataclasses.asdict(self)
        # Both sections are JSON text; surrogateescape carries even what is not, unchanged.
        for section in ("manifest", "objects"):
            body[section] = body[section].decode("utf-8", "surrogateescape")
        return json.dumps({"version": FORMAT_VERSION, **body}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> RankRecord:
        """Raises: FormatVersionError, ReplicaCorrupt."""
        body = _body(text, "rank record")
        try:
            for section in ("manifest", "objects"):
                body[section] = body[section].encode("utf-8", "surrogateescape")
            return cls(**{field.name: body[field.name] for field in dataclasses.fields(cls)})
        except (KeyError, TypeError, AttributeError) as error:
            raise ReplicaCorrupt(f"unreadable rank record: {error!r}") from error


def _body(text: bytes, what: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
        version = body["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ReplicaCorrupt(f"unreadable {what}: {error!r}") from error
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{what} of format version {version}; this release reads version {FORMAT_VERSION}: "
            "use the gemini-run that wrote it"
        )
    if not isinstance(body, dict):
        raise ReplicaCorrupt(f"unreadable {what}: not an object")
    return body
