"""Kernels that are reached over sockets in a folder, for tests and for `tools/notebooks.py`.

Jupyter chooses five free ports, closes them, and has the kernel open them a second later. Where
another process has taken that of IOPub in between, the kernel lives and never says a word. No other
process takes a name in our folder.
"""

import itertools
import tempfile

import jupyter_client

FOLDER = tempfile.TemporaryDirectory(prefix="kernels-")  # removed when this process ends
NUMBER = itertools.count()


class Reached:
    """Where a kernel listens, by the names that Jupyter's managers have for it."""

    def _transport_default(self):
        return "ipc"

    def _ip_default(self):
        return f"{FOLDER.name}/{next(NUMBER)}"


class KernelManager(Reached, jupyter_client.KernelManager):
    """Jupyter's own, but for where its kernel listens."""


class AsyncKernelManager(Reached, jupyter_client.AsyncKernelManager):
    """The same, as nbclient asks for it."""
