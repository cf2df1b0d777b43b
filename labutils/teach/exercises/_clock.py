"""How long an attempt may take."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

WAITING = 3
"""An attempt that waits may take so many times the seconds of one that computes."""


class TimeIsUp(KeyboardInterrupt):
    """An interrupt that the clock sends: the attempt ends as if you had pressed stop."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in this block after so many seconds, where the system has an alarm.

    They are seconds of this process's own computing, so that a busy machine gives as much time as
    a quiet one; what waits for something is stopped `WAITING` times as late.
    """
    began, computed = time.monotonic(), time.process_time()

    def ring(*_: object) -> None:
        waited = time.monotonic() - began >= WAITING * seconds
        if waited or time.process_time() - computed >= seconds:
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
