"""A tiny process beside the agent that ends the workers' sessions when the agent dies.

Run as a plain script with the standard library alone: it must cost nothing and depend on nothing. It reads lines
``+<session>`` and ``-<session>`` from standard input. At end of file (the agent ended, however that came) every
process of the sessions still listed is killed, grandchildren included.
"""

from __future__ import annotations

import os
import signal
import sys
import time

ROUNDS = 20  # a process may fork while it is being looked for: look again until nothing is left


def members(sessions: set[int]) -> list[int]:
    """The processes whose session is in `sessions` (dead ones not yet waited for left out)."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) in sessions and fields[0] not in (b"Z", b"X"):
            found.append(int(entry))
    return found


def end(sessions: set[int]) -> None:
    """Kill every process of `sessions`."""
    for _ in range(ROUNDS):
        pids = members(sessions)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it ended meanwhile, or became another user's
        time.sleep(0.02)


def main() -> None:
    # The agent handles these for the whole job; the guard must outlive it to clean up.
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
    for name in handled:
        signal.signal(name, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin.buffer:
        sign, number = line[:1], line[1:].strip()
        if sign == b"+":
            sessions.add(int(number))
        elif sign == b"-":
            sessions.discard(int(number))
    if sessions:
        end(sessions)


if __name__ == "__main__":
    main()
