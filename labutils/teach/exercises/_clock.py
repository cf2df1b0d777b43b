"""How long an attempt may take."""

import contextlib
import glob
import signal
import threading
import time
from collections.abc import Iterator

WAITING = 3
"""An attempt that waits may take so many times the seconds of one that computes."""

_spent = [0.0, 0.0]  # seconds in which attempts waited for something, and which they computed
_marks = [0.0, 0.0, 0.0]  # the clocks where `_count` last read them
_spared = [0]  # blocks that run now and are not the attempt's


class TimeIsUp(KeyboardInterrupt):
    """An interrupt that the clock sends: the attempt ends as if you had pressed stop."""


def _queued() -> float:
    """Seconds for which threads of this process waited for a processor, where Linux tells them."""
    found = 0
    for path in glob.glob("/proc/self/task/*/schedstat"):
        with contextlib.suppress(OSError), open(path) as file:  # the thread may be gone
            found += int(file.read().split()[1])
    return found / 1e9


def _count() -> None:
    """Add what passed since the last count. Who waits for a processor on a busy machine waits for
    nothing of its own."""
    now = [time.monotonic(), time.process_time(), _queued()]
    passed, computed, queued = (max(0.0, b - a) for a, b in zip(_marks, now, strict=True))
    _marks[:] = now
    if not _spared[0]:
        _spent[0] += max(0.0, passed - computed - queued)
        _spent[1] += computed


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """What a check measures for itself in this block is not counted as the attempt's time."""
    _count()
    _spared[0] += 1
    try:
        yield
    finally:
        _count()
        _spared[0] -= 1


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in this block after so many seconds, where the system has an alarm.

    They are seconds of this process's own computing, so that a busy machine gives as much time as
    a quiet one; what waits for something is stopped `WAITING` times as late.
    """
    _count()
    waited, computed = _spent

    def ring(*_: object) -> None:
        _count()
        if _spared[0]:
            return
        if _spent[0] - waited >= WAITING * seconds or _spent[1] - computed >= seconds:
            # Once more if that is caught, and not before what is to be cleaned up had time.
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 5))
            raise TimeIsUp

    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds / 10, seconds / 10)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
