"""How long an attempt may take."""

import contextlib
import signal
import threading
from collections.abc import Iterator


class TimeIsUp(KeyboardInterrupt):
    """An interrupt that the clock sends: the attempt ends as if you had pressed stop."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raises `TimeIsUp` in this block after so many seconds, where the system has an alarm."""

    def ring(*_: object) -> None:
        raise TimeIsUp

    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
