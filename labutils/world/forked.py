"""How the ranks' fork server, which loads this beside what a rank needs, ends."""

import atexit
import contextlib
import multiprocessing.forkserver
import os
import signal

_TIDYING = 5  # seconds


def _outlive_ranks() -> None:
    """Let ranks whose kernel is gone tidy up: they are killed where their fork server ends.

    A rank that does not end by itself ends with the server, which its own alarm then kills.
    """
    known = multiprocessing.forkserver._forkserver
    if not known._forkserver_address or known._forkserver_pid:
        return  # not a server: a process without one, or one that has started one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_TIDYING)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


atexit.register(_outlive_ranks)
