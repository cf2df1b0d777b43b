"""The tested implementations behind the labs: a module per concept, read as in `zero.partition`."""

import sys

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "labutils runs on Linux and macOS: ranks are processes that a fork server starts. On "
        "Windows it runs in WSL: `wsl --install` in PowerShell, then the two commands of the "
        "README in its terminal"
    )
