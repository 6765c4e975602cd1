"""One node's part in a durable checkpoint: answers the root, and moves this node's bytes in the background."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from gemini_run.durable.layout import Place, StoredFile
from gemini_run.durable.tier import DurableTier
from gemini_run.durable.upload import RankPart, SlotReader, Stored, store_part
from gemini_run.errors import DurableError, GeminiError
from gemini_run.memory.segment import NodeMemory
from gemini_run.memory.slots import set_file_hold

Message = dict[str, Any]
STOP_PATIENCE = 5.0  #: seconds to wait for an upload that was told to stop


class NodePart:
    """What this node holds and uploads. Handlers take and give JSON; a failure is ``{"error": line}``.

    Attributes:
        iteration: the one being persisted, from `collect` to `release`; None between.
        durable: newest iteration that the root said is durable.
    """

    def __init__(self, memory: NodeMemory, tier: DurableTier) -> None:
        self._memory = memory
        self._tier = tier
        self._lock = threading.Lock()
        self._upload: _Upload | None = None
        self.iteration: int | None = None
        self.durable: int | None = None

    def collect(self, payload: Message) -> Message:
        """``{iteration, ranks, world_size}`` -> ``{ranks: {rank: {manifest, checksums}}}``; held from now on."""
        iteration = int(payload["iteration"])
        with self._lock:
            self.iteration = iteration
        answer = {}
        try:
            for rank in payload["ranks"]:
                info = self._memory.find(rank, iteration, payload["world_size"])
                # Held first, read then: a worker must not begin to write in between.
                if info is None or not set_file_hold(info.path, iteration, True):
                    raise DurableError(f"{self._memory.node_id}: no slot of rank {rank} at iteration {iteration}")
                with SlotReader(info.path, iteration) as reader:
                    answer[str(rank)] = {
                        "manifest": reader.shard.manifest.to_json().decode(),
                        "checksums": list(reader.shard.checksums),
                    }
        except (GeminiError, OSError) as error:
            return {"error": str(error)}
        return {"ranks": answer}

    def upload(self, payload: Message) -> Message:
        """``{iteration, node_rank, ranks: {rank: {writes, uses}}}``: begin to store it; `status` tells the rest."""
        iteration = int(payload["iteration"])
        parts = {}
        for rank, part in payload["ranks"].items():
            info = self._memory.find(int(rank), iteration)
            if info is None:
                return {"error": f"{self._memory.node_id}: no slot of rank {rank} at iteration {iteration}"}
            writes = [(int(entry), int(item)) for entry, item in part["writes"]]
            parts[int(rank)] = RankPart(info.path, writes, part["uses"])
        with self._lock:
            if self._upload is not None and self._upload.running:
                return {"error": f"{self._memory.node_id}: still storing iteration {self._upload.iteration}"}
            self._upload = _Upload(self._tier, iteration, int(payload["node_rank"]), parts)
        return {}

    def status(self, payload: Message) -> Message:
        """``{iteration}`` -> ``{running}``, and when it has ended well ``{files, places}``."""
        upload = self._upload
        if upload is None or upload.iteration != payload["iteration"]:
            return {"error": f"{self._memory.node_id}: not storing iteration {payload['iteration']}"}
        return upload.status()

    def release(self, payload: Message) -> Message:
        """``{iteration, durable}``: it is over, well or not. Ends the upload and clears the holds up to it."""
        self.stop()
        if payload["durable"] is not None:
            self.durable = payload["durable"]
        for info in self._memory.scan():
            if info.header and info.header.hold and info.header.iteration <= payload["iteration"]:
                set_file_hold(info.path, info.header.iteration, False)
        return {}

    def sweep(self, round_number: int, own: range) -> None:
        """Clear holds that nobody will collect: of older rounds, and of slots that are not our own ranks'."""
        for info in self._memory.scan():
            header = info.header
            if not header or not info.usable or not header.hold or header.iteration == self.iteration:
                continue
            if header.round < round_number or header.owner not in own:
                set_file_hold(info.path, header.iteration, False)

    def stop(self) -> None:
        """End the upload, if one runs; the holds become ordinary ones, for `sweep`."""
        with self._lock:
            self.iteration = None
            upload = self._upload
        if upload is not None:
            upload.stop()


class _Upload:
    """`store_part` on a thread of its own."""

    def __init__(self, tier: DurableTier, iteration: int, node_rank: int, parts: dict[int, RankPart]) -> None:
        self.iteration = iteration
        self._stop = threading.Event()
        self._stored: Stored | None = None
        self._error: str | None = None
        self._thread = threading.Thread(
            target=self._main, args=(tier, node_rank, parts), name="gemini-upload", daemon=True
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def _main(self, tier: DurableTier, node_rank: int, parts: dict[int, RankPart]) -> None:
        try:
            self._stored = store_part(tier, self.iteration, node_rank, parts, self._stop)
        except Exception as error:  # noqa: BLE001 - the thread's top: the root is told the cause
            self._error = str(error) if isinstance(error, GeminiError) else repr(error)

    def status(self) -> Message:
        if self.running:
            return {"running": True}
        if self._stored is None:
            return {"error": self._error or "the upload was stopped"}
        return {"running": False, **encode_stored(self._stored)}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(STOP_PATIENCE)


def encode_stored(stored: Stored) -> Message:
    return {
        "files": {name: [file.size, file.xxh3] for name, file in stored.files.items()},
        "places": [[index, *dataclasses.astuple(place)] for index, place in stored.places.items()],
    }


def decode_stored(message: Message) -> Stored:
    """Inverse of `encode_stored`."""
    return Stored(
        {name: StoredFile(size, xxh3) for name, (size, xxh3) in message["files"].items()},
        {index: Place(*place) for index, *place in message["places"]},
    )
