"""A process that can do little harm, and is ended with all that it started.

What the system offers is used. Everywhere: limits of the process, and what `ps` or /proc tells of
it and of those that it started. On Linux, without an administrator: name spaces (a view of its own
of processes, network and mounted files, these read-only) and Landlock (which files it may open).
It is no jail for determined attackers: against those, run the grader in a container or a virtual
machine of its own.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import resource
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import labutils

LINUX = sys.platform == "linux"
LOOK = 0.05  # seconds between looks at a process
WAITING = 5  # times as many seconds as it may compute may an answer wait
_TICKS = os.sysconf("SC_CLK_TCK")
_LIBC = ctypes.CDLL(None, use_errno=True)
_NEW_USER, _NEW_MOUNT, _NEW_PID = 0x10000000, 0x20000, 0x20000000
_NEW_NET, _NEW_IPC = 0x40000000, 0x8000000
_BIND, _PRIVATE, _SET_MOUNT = 0x1000, 0x44000, 442  # flags of mount; a system call's number
_SUBREAPER, _NO_NEW_PRIVILEGES, _DIE_WITH_PARENT = 36, 38, 1  # of prctl
# Landlock: its system calls, how many rights to files its versions know, and those to read.
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_KNOWN, _READ, _OF_A_FILE = {1: 13, 2: 14, 3: 15, 5: 16}, 0b1101, 0b110
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/sys", "/dev", "/opt", "/nix")


@dataclass(frozen=True)
class Limits:
    """What a submission may take to answer one exercise.

    seconds: of computing, and `WAITING` times as many in which it waits for something other than
        a processor, so that a busy machine gives as much time as a quiet one
    memory: bytes, beside those of the libraries
    written: bytes of one file, and of its output; four times as many in all
    processes: at a time
    """

    seconds: float = 60
    memory: int = 2_000_000_000
    written: int = 16_000_000
    processes: int = 64


def enter(folder: str, limits: Limits) -> set[str]:
    """Give up what a submission does not need; what is out of reach now, of children above all."""
    os.setsid()
    out_of_reach = set()
    if LINUX:
        out_of_reach |= _separate(folder.encode())
        _LIBC.prctl(_SUBREAPER, 1, 0, 0, 0)
        _LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
        out_of_reach |= _landlock(folder)
    _limit(limits)
    return out_of_reach


def _separate(folder: bytes) -> set[str]:
    """Name spaces of its own, in which only the folder can be written."""
    user, group = os.getuid(), os.getgid()
    if _LIBC.unshare(_NEW_USER | _NEW_MOUNT | _NEW_PID | _NEW_NET | _NEW_IPC):
        return set()
    names = {
        "setgroups": "deny",
        "uid_map": f"{user} {user} 1",
        "gid_map": f"{group} {group} 1",
    }
    for name, text in names.items():
        with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    read_only, writable = struct.pack("4Q", 1, 0, 0, 0), struct.pack("4Q", 0, 1, 0, 0)
    failed = (
        _LIBC.mount(None, b"/", None, _PRIVATE, None)
        or _LIBC.mount(folder, folder, None, _BIND, None)
        or _LIBC.syscall(_SET_MOUNT, -100, b"/", 0x8000, read_only, 32)
        or _LIBC.syscall(_SET_MOUNT, -100, folder, 0, writable, 32)
    )
    return {"signals", "network"} if failed else {"signals", "network", "files"}


def _limit(limits: Limits) -> None:
    size = _status(os.getpid())
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(2 * limits.seconds) + 5,
        resource.RLIMIT_FSIZE: limits.written,
        resource.RLIMIT_NOFILE: 256,
    }
    if not LINUX:  # where they are counted for a user, not for what a name space holds
        wanted[resource.RLIMIT_NPROC] = len(Listed().rows) + 2 * limits.processes
    if size:  # of address space, which torch reserves and does not use, there is more
        wanted[resource.RLIMIT_DATA] = size["VmData"] + limits.memory
        wanted[resource.RLIMIT_AS] = size["VmSize"] + 2 * limits.memory
    for kind, amount in wanted.items():
        most = resource.getrlimit(kind)[1]
        amount = amount if most == resource.RLIM_INFINITY else min(amount, most)
        resource.setrlimit(kind, (amount, amount))


def _landlock(folder: str) -> set[str]:
    """Files can be opened in the folder, and read where Python and the system live."""
    version = _LIBC.syscall(_CREATE, None, 0, 1)
    if version < 1:
        return set()
    rights = (1 << _KNOWN[max(known for known in _KNOWN if known <= version)]) - 1
    # Rights to files; to bind and connect by TCP; to reach others' signals and abstract sockets.
    asked = struct.pack("3Q", rights, 3, 3)[: 8 * (1 + (version >= 4) + (version >= 6))]
    rules = _LIBC.syscall(_CREATE, asked, len(asked), 0)
    if rules < 0:
        return set()
    python = {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), *labutils.__path__}
    allowed = {**dict.fromkeys((*_SYSTEM, *python), _READ), "/dev/null": rights, folder: rights}
    for path, granted in allowed.items():
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_PATH)
            granted &= rights if os.path.isdir(path) else _OF_A_FILE
            _LIBC.syscall(_ADD, rules, 1, struct.pack("=Qi", granted, handle), 0)
            os.close(handle)
    failed = _LIBC.syscall(_RESTRICT, rules, 0)
    os.close(rules)
    if failed:
        return set()
    return {"files", "signals"} if version >= 6 else {"files"}


class Contained:
    """`program(send, out_of_reach)` in a process of its own, in a folder of its own.

    What it sends is in `sent`, up to `MOST` bytes; `out_of_reach` is what `enter` returned.
    """

    MOST = 100_000

    def __init__(
        self, program: Callable[[Callable[[str], int], set[str]], object], limits: Limits
    ) -> None:
        self.limits = limits
        self.folder = tempfile.mkdtemp(prefix="grade-")
        self.looked, self.waited, self.sent, self.ended = time.monotonic(), 0.0, b"", ""
        self.pipe, theirs = os.pipe()
        os.set_blocking(self.pipe, False)
        self.leader = os.fork()
        if not self.leader:
            _lead(program, theirs, self.folder, limits)
        os.close(theirs)

    def look(self) -> bool:
        """Whether it has ended, or was ended; `ended` says why, "" where it ended by itself."""
        self._read()
        done, status, used = os.wait4(self.leader, os.WNOHANG)
        if done:
            code, computed = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
            # The system's limit on computing came before the look of a grader that was late.
            late = code == 128 + signal.SIGKILL and computed > self.limits.seconds
            self._close(self._too_long() if late else _spoken(code))
        elif too_much := self._too_much():
            self.stop(too_much)
        return bool(done or self.ended)

    def stop(self, why: str) -> None:
        """End it with all that it started."""
        end(self.leader)
        self._close(why)

    def _close(self, why: str) -> None:
        self.ended = why
        self._read()
        os.close(self.pipe)
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            subprocess.run([*command, self.folder], stderr=subprocess.DEVNULL)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self.sent) <= self.MOST and (more := os.read(self.pipe, 65536)):
                self.sent += more

    def _too_much(self) -> str:
        limits, system = self.limits, System()
        running = list(itertools.islice(system.descendants(self.leader), limits.processes + 1))
        before, self.looked = self.looked, time.monotonic()
        if not any(map(system.wants_to_run, (self.leader, *running))):
            self.waited += self.looked - before
        # A machine that is busy looks late, and then several limits may be passed: time is named
        # last, so that the reason is the same on any machine.
        if len(running) > limits.processes:
            return f"stopped: it started more than {limits.processes} processes"
        if len(self.sent) > self.MOST:
            return "stopped: it wrote into the grader's own channel"
        shared = system.memory(self.leader)  # with all that were forked from it
        memory = sum(max(0, system.memory(pid) - shared) for pid in running)
        if memory > limits.memory * 1.5:
            return f"stopped: its processes hold {memory / 1e9:.1f} GB"
        if bytes_below(self.folder) > 4 * limits.written:
            return f"stopped: it wrote more than {4 * limits.written / 1e6:g} MB"
        if sum(map(system.computed, running)) > limits.seconds:
            return self._too_long()
        if self.waited > WAITING * limits.seconds:
            return f"stopped: it did not end within {WAITING * limits.seconds:g} seconds of waiting"
        return ""

    def _too_long(self) -> str:
        return f"stopped: it did not end within {self.limits.seconds:g} seconds of computing"


def _lead(program: Callable, pipe: int, folder: str, limits: Limits) -> None:
    """Be the process between the grader and a submission: its parent, and that of its orphans."""
    code = 70
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(os.path.join(folder, ".output"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 4096)
        out_of_reach = enter(folder, limits)
        if not (child := os.fork()):
            os.setsid()  # a signal to its group does not reach the leader
            if LINUX:
                _LIBC.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(PATH=os.defpath, HOME=folder, TMPDIR=folder, OMP_NUM_THREADS="1")
            tempfile.tempdir = None
            program(lambda text: os.write(pipe, text.encode()), out_of_reach)
        os.close(pipe)
        while (ended := os.wait())[0] != child:
            pass
        code = os.waitstatus_to_exitcode(ended[1])
        for pid in System().descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):  # such as `ps` itself
                os.kill(pid, signal.SIGKILL)
    finally:
        os._exit(code if code >= 0 else 128 - code)


def _spoken(code: int) -> str:
    """Why a process ended that was to send its verdict first, from its exit code."""
    if not code:
        return ""
    number = code - 128 if code > 128 else -code if code < 0 else 0
    if number in (each.value for each in signal.Signals):
        return f"it was killed by {signal.Signals(number).name}"
    return f"it left with exit code {code}"


def _status(pid: int) -> dict[str, int]:
    """Bytes of a process by the names of /proc, or nothing where there is none."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        lines = [line.split() for line in file if line.endswith(" kB\n")]
        return {name.rstrip(":"): 1024 * int(amount) for name, amount, _ in lines}
    return {}


class Linux:
    """What processes do, as /proc tells it when asked."""

    def memory(self, pid: int) -> int:
        """Bytes that a process holds alone."""
        return _status(pid).get("RssAnon", 0)

    def computed(self, pid: int) -> float:
        """Seconds that a process and the children that it waited for have computed."""
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
            return sum(map(int, file.read().rpartition(")")[2].split()[11:15])) / _TICKS
        return 0.0

    def wants_to_run(self, pid: int) -> bool:
        """Whether a thread of a process runs, or would if a processor were free."""
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "R":
                        return True
        return False

    def descendants(self, pid: int) -> Iterator[int]:
        """The processes that a process has started and theirs."""
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{task}/children") as file:
                    children = file.read().split()
                for child in map(int, children):
                    yield child
                    yield from self.descendants(child)


class Listed:
    """The same of any other system, as `ps` told it once. Who lost its parent is not found."""

    def __init__(self) -> None:
        self.rows: dict[int, list[str]] = {}
        with contextlib.suppress(OSError):  # no process can be started: limits hold still
            told = ["ps", "-Ao", "pid=,ppid=,stat=,rss=,time="]
            listed = subprocess.run(told, capture_output=True, text=True).stdout.splitlines()
            self.rows = {int(pid): rest for pid, *rest in map(str.split, listed)}

    def memory(self, pid: int) -> int:
        return 1024 * int(self.rows[pid][2]) if pid in self.rows else 0

    def computed(self, pid: int) -> float:
        """Of the process alone, from [days-][hours:]minutes:seconds."""
        days, _, clock = self.rows[pid][3].rpartition("-") if pid in self.rows else ("", "", "0")
        parts = map(float, clock.replace(",", ".").split(":"))
        passed = functools.reduce(lambda before, part: 60 * before + part, parts)
        return 86_400 * float(days or 0) + passed

    def wants_to_run(self, pid: int) -> bool:
        return pid in self.rows and self.rows[pid][1].startswith("R")

    def descendants(self, pid: int) -> Iterator[int]:
        for child, row in self.rows.items():
            if int(row[0]) == pid:
                yield child
                yield from self.descendants(child)


System: type[Linux] | type[Listed] = Linux if LINUX else Listed


def end(leader: int) -> None:
    """Kill a leader's processes until none is left, then itself."""
    for _ in range(100):
        running = list(System().descendants(leader))
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not running:
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
        os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)


def bytes_below(folder: str, most: int = 5000) -> int:
    """Bytes in a folder, a block for each entry; past `most` entries more than any limit."""
    total, seen, todo = 0, 0, [folder]
    while todo:
        with contextlib.suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                seen += 1
                if seen > most:
                    return 10**18
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                if entry.is_dir(follow_symlinks=False):
                    todo.append(entry.path)
    return total
