"""Starting workers: from a pre-imported process where that is safe, else plainly.

The rules. A zygote forks every worker of the node, as long as it has one thread and no open device. What the script
was seen to import beyond the usual is imported by the next zygote, which takes the place of the first in the
background; a module that leaves threads behind is left out of it. Where the usual imports leave threads (a .pth file or
a sitecustomize may bring them in) one standby for each worker waits with its imports done and becomes the worker. Where
neither serves (another command or environment, a device that is open after the imports, ``--no-zygote``) workers
start cold.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gemini_run.agent.preimported import Preimported, StartRequest, ZygoteUnfit, with_boot
from gemini_run.agent.process import Guard, WorkerProcess, reap_adopted


def is_plain_python(args: Sequence[str]) -> bool:
    """Whether the command is torchrun's default: this interpreter on a script or a module. Only then is it sure
    that the boot hook runs before the script."""
    return len(args) > 2 and args[0] == sys.executable and args[1] == "-u"


class WorkerStarter:
    """Starts the workers of one node, over all its rounds.

    Args:
        command: the workers' command as the agent will start it.
        num_workers: of this node.
        use_zygote: False: always start plainly.
        imports: file with the third-party modules that workers of this run were seen to import (a JSON list).
        on_event: called with an event's name and fields.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_workers: int,
        use_zygote: bool,
        imports: Path,
        on_event: Callable[..., None],
    ) -> None:
        self._guard = Guard()
        self._ended: set[int] = set()
        self._on_event = on_event
        self._command = tuple(command)
        self._num_workers = num_workers
        self._imports = imports
        self._imports_seen: tuple[int, int] | None = None  # of the file when it was read last
        self._left_out: set[str] = set()
        self._zygote: Preimported | None = None
        self._next: Preimported | None = None  # takes the zygote's place once its imports are done
        self._standbys: list[Preimported] = []
        self._uses_standbys = False
        self._enabled = use_zygote and is_plain_python(command)
        if self._enabled:
            self._imports_changed()
            self._zygote = self._preimport()

    def start(self, request: StartRequest) -> WorkerProcess:
        """Start one worker, leader of its own session.

        Raises:
            OSError: the command cannot be started.
        """
        worker = self._from_preimported(request)
        if worker is None:
            popen = subprocess.Popen(
                request.args,
                env=with_boot(request.env, {"mode": "cold"}) if is_plain_python(request.args) else request.env,
                stdout=request.stdout,
                stderr=request.stderr,
                start_new_session=True,
            )
            worker = WorkerProcess(popen.pid, popen)
        self._guard.watch(worker.pid)
        self._ended.discard(worker.pid)  # the number came again
        return worker

    def prepare(self) -> None:
        """While the workers train: have what the next round starts from. Cheap where there is nothing to do."""
        if not self._enabled:
            return
        if self._uses_standbys:
            while len(self._standbys) < self._num_workers:
                self._standbys.append(self._preimport())
            return
        if self._next is not None:
            if self._next.settled():
                self._take_next(self._next)
            return
        if self._imports_changed():
            self._next = self._preimport()

    def ended(self, worker: WorkerProcess) -> None:
        """`worker` has been waited for: its session is no longer this agent's to end."""
        self._guard.forget(worker.pid)
        self._ended.add(worker.pid)

    def reap(self) -> None:
        """Wait for what ended workers left behind and died since."""
        reap_adopted(self._ended)

    def close(self) -> None:
        """End what is pre-imported, and every worker that was not reported as ended. Idempotent."""
        for each in (self._zygote, self._next, *self._standbys):
            self._drop(each)
        self._zygote = self._next = None
        self._standbys = []
        self._enabled = False
        self._guard.close()

    # --- the pre-imported processes -------------------------------------------------------------------

    def _from_preimported(self, request: StartRequest) -> WorkerProcess | None:
        began = time.monotonic()
        for each in [self._zygote, *self._standbys]:
            if each is None:
                continue
            fresh = each.kind is None
            try:
                pid = each.start(request)
            except ZygoteUnfit as unfit:
                self._on_event("zygote_unfit", reason=str(unfit))
                if each.usable:
                    return None  # it is this worker that does not fit: the others are no better
                self._forget(each)
                continue
            if fresh:
                self._on_event("zygote_ready", bytes=each.num_bytes, kind=each.kind)
            self._on_event(
                "zygote_forked" if each.process is None else "standby_taken",
                pid=pid,
                rank=int(request.env.get("RANK", 0)),
                ms=round((time.monotonic() - began) * 1e3, 1),
            )
            if each.process is None:
                return WorkerProcess(pid)
            self._uses_standbys = True
            self._forget(each)
            return WorkerProcess(pid, each.process)
        return None

    def _take_next(self, fresh: Preimported) -> None:
        self._next = None
        if fresh.kind == "fork":
            self._drop(self._zygote)
            self._zygote = fresh
            self._on_event("zygote_ready", bytes=fresh.num_bytes, kind=fresh.kind, imported=fresh.imported)
            return
        self._drop(fresh)
        self._on_event("zygote_unfit", reason=fresh.reason, culprits=fresh.culprits)
        if fresh.culprits:  # else the one that there is serves on
            self._left_out.update(fresh.culprits)
            self._next = self._preimport()

    def _preimport(self) -> Preimported:
        made = Preimported(self._command, dict(os.environ), self._imports, sorted(self._left_out))
        self._guard.watch(made.pid)
        return made

    def _forget(self, each: Preimported) -> None:
        if each is self._zygote:
            self._zygote = None
        else:
            self._standbys.remove(each)
        self._drop(each)

    def _drop(self, each: Preimported | None) -> None:
        if each is not None:
            each.close()
            self._guard.forget(each.pid)

    def _imports_changed(self) -> bool:
        """Whether workers were seen to import more than when this was asked last."""
        try:
            stat = self._imports.stat()
        except OSError:
            return False  # none yet
        before, self._imports_seen = self._imports_seen, (stat.st_mtime_ns, stat.st_ino)
        return before != self._imports_seen
