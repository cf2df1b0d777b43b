"""How long an attempt may take."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

WAITING = 3
"""An attempt that waits may take so many times the seconds of one that computes."""


_spared = [0.0, 0.0]  # seconds that passed, and that were computed, in what is not the attempt's
_sparing: list[tuple[float, float]] = []  # when what runs now and is not the attempt's began


class TimeIsUp(KeyboardInterrupt):
    """An interrupt that the clock sends: the attempt ends as if you had pressed stop."""


def _own() -> tuple[float, float]:
    """Seconds on the clock and of computing, without those that were spared."""
    return time.monotonic() - _spared[0], time.process_time() - _spared[1]


@contextlib.contextmanager
def spared() -> Iterator[None]:
    """What a check measures for itself in this block is not counted as the attempt's time."""
    _sparing.append((time.monotonic(), time.process_time()))
    try:
        yield
    finally:
        began, computed = _sparing.pop()
        if not _sparing:
            _spared[0] += time.monotonic() - began
            _spared[1] += time.process_time() - computed


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in this block after so many seconds, where the system has an alarm.

    They are seconds of this process's own computing, so that a busy machine gives as much time as
    a quiet one; what waits for something is stopped `WAITING` times as late.
    """
    began, computed = _own()

    def ring(*_: object) -> None:
        if _sparing:
            return
        now, so_far = _own()
        if now - began >= WAITING * seconds or so_far - computed >= seconds:
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
