"""A worker's end that makes its node restart, and how many restarts are left. Pure."""

from __future__ import annotations

import dataclasses
import signal

from gemini_run.wire import EXIT_FATAL, EXIT_REPLAN


@dataclasses.dataclass(frozen=True)
class WorkerFailure:
    """The end of one worker that made its node restart.

    Attributes:
        rank: global rank.
        local_rank: on this node.
        pid: of the worker.
        exitcode: as of a shell's view: code, or minus the signal's number.
        exception: ``Type: message`` where the worker left its exception, else None.
        iteration: newest iteration that a worker of this node had finished, None before the first.
    """

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    exception: str | None
    iteration: int | None

    @property
    def signal_name(self) -> str | None:
        if self.exitcode >= 0:
            return None
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"  # a real-time signal

    @property
    def cause(self) -> str:
        if self.signal_name:
            return f"killed by {self.signal_name}"
        if self.exitcode == EXIT_REPLAN:
            return "refused its checkpoint slot"
        if self.exception:
            return f"raised {self.exception.splitlines()[0]}"
        if self.exitcode == EXIT_FATAL:
            return "met what no restart can mend"
        return f"exited with code {self.exitcode}"

    def __str__(self) -> str:
        known = self.iteration is not None and self.exitcode != EXIT_REPLAN  # that one did not come to any
        where = f" at iteration {self.iteration}" if known else ""
        verb = f"was {self.cause}" if self.signal_name else self.cause
        return f"worker rank {self.rank} (pid {self.pid}) {verb}{where}"


class RestartBudget:
    """How many restarts without progress are left. Pure bookkeeping.

    A restart is refunded once an iteration beyond the last failure's was finished. The same exception, or the same
    exit code without one, at the same iteration twice in a row is the script's own fault: nothing is left then.

    Attributes:
        limit: restarts without progress allowed (``--max-restarts``).
        left: of these.
        hopeless: why restarting is useless, else None.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left = limit
        self.hopeless: str | None = None
        self._last: WorkerFailure | None = None

    def charge(self, failure: WorkerFailure) -> bool:
        """Count `failure`; whether the workers may be restarted."""
        last, self._last = self._last, failure
        if last is not None:
            if _newer(failure.iteration, last.iteration):
                self.left = self.limit
            elif (
                failure.exitcode > 0
                and failure.exitcode != EXIT_REPLAN
                and _of_the_script(failure) == _of_the_script(last)
            ):
                what = "exception" if failure.exception else "exit code"
                self.hopeless = f"the same {what} at the same iteration twice in a row is the script's own"
                self.left = 0
        if self.left == 0:
            return False
        self.left -= 1
        return True


def _of_the_script(failure: WorkerFailure) -> tuple[int, str | None, int | None]:
    return failure.exitcode, failure.exception, failure.iteration


def suspicion(exitcode: int) -> int:
    """Sorts exit codes: the cause of a failure before its consequences."""
    if exitcode in (EXIT_FATAL, EXIT_REPLAN):
        return 0
    if exitcode == -signal.SIGTERM:
        return 2
    return 1 if exitcode > 0 else 0


def _newer(iteration: int | None, than: int | None) -> bool:
    return iteration is not None and iteration > (than if than is not None else 0)
