"""Messages between processes of one machine: sockets say what is there, shared memory holds it.

A small message is *eager*: it leaves through the socket at once, and the receiver keeps it until
somebody asks for it. A large one is a *rendezvous*: only when the receiver has said READY does the
sender copy it, a PART at a time, into a ring buffer of slots in shared memory; the receiver empties
each slot, or adds it to its own tensor, and gives it back as FREE. So no message waits in front of
another one, and adding overlaps with receiving. Either way a send is done when the receiver is
ready, and the sender knows by then that dtype, length and collective fit.
"""

import contextlib
import ctypes
import glob
import itertools
import mmap
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import BinaryIO

import torch
from torch import Tensor

from labutils import units
from labutils.world.errors import DeadlockError, Stopped, place
from labutils.world.messages import NO_TENSOR, Endpoint, Request, misfit, out_of_time
from labutils.world.progress import BLOCKED, ENDED, RUNNING, Progress

_HEADER = struct.Struct("<BIIQ")  # kind, channel, run, bytes of what follows, or of a part
_READY, _EAGER, _PART, _FREE = range(4)
_SMALL = 1 << 13  # bytes up to which a message is eager
_SLOT = 1 << 20  # bytes; each slot costs a look at the sockets
_SLOTS = 4  # for each direction of a pair
_SLOTS_AT = 1 << 16  # bytes; before them ranks say what they do
_PATH = 80  # bytes of a folder's path; a socket's own has 104 at most (macOS)
_PREFIX = "ranks-"
_LOOK = 0.02  # seconds without news after which a waiting rank looks around


def make_folder() -> tuple[str, BinaryIO]:
    """A folder where ranks meet, and a locked file in it, by which `sweep_folders` sees that its
    owner lives: the lock ends with the process, however it ends."""
    import fcntl

    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=short_place())
    lock = open(os.path.join(folder, "new"), "wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(lock.name, os.path.join(folder, "owner"))  # not before it is locked
    return folder, lock


def sweep_folders() -> None:
    """Remove the folders of owners that are gone, as when a kernel is killed with all its
    processes."""
    import fcntl

    for path in glob.glob(os.path.join(short_place(), _PREFIX + "*", "owner")):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def short_place() -> str:
    """The folder for temporary files, or /tmp where its path leaves no room for a socket's name."""
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= _PATH else "/tmp"


def create_memory(folder: str, size: int) -> BinaryIO:
    """What `size` ranks share: a file that they open by `open_memory` while it is open here.

    It has slots for every pair, which take room once touched. Raises RuntimeError where there is
    no room for them.
    """
    path = os.path.join(folder, "memory")
    if hasattr(os, "memfd_create"):  # which no disk holds, and no limit on /dev/shm concerns
        file = os.fdopen(os.memfd_create("ranks"), "r+b")
        os.symlink(f"/proc/{os.getpid()}/fd/{file.fileno()}", path)
    else:
        file = open(path, "w+b")
    nbytes = _SLOTS_AT + size * size * _SLOTS * _SLOT
    try:
        file.truncate(nbytes)
    except OSError as error:
        file.close()
        what = f"{size} ranks share a file of {units.text(nbytes)}, which this system refuses"
        remedy = "start the notebook after `ulimit -f unlimited`, take fewer ranks, or threads"
        raise RuntimeError(f"{what} ({error.strerror}): {remedy}") from None
    return file


def open_memory(folder: str, size: int) -> Progress:
    """The shared memory, with what the ranks say that they do at its beginning."""
    with open(os.path.join(folder, "memory"), "r+b") as file:
        return Progress(mmap.mmap(file.fileno(), 0), size)


def connect(
    folder: str, rank: int, size: int, barrier: Callable[[], None]
) -> dict[int, socket.socket]:
    """A connection to each other rank: those above this one call, and say who they are.

    folder: where the `size` ranks meet
    barrier: returns when all of them have opened their door
    """
    peers: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(os.path.join(folder, str(rank)))
        door.listen(size)
        barrier()  # every door is open
        for peer in range(rank):
            peers[peer] = socket.socket(socket.AF_UNIX)
            peers[peer].connect(os.path.join(folder, str(peer)))
            peers[peer].sendall(rank.to_bytes(4, "big"))
        for _ in range(rank + 1, size):
            caller, _ = door.accept()
            peers[int.from_bytes(caller.recv(4, socket.MSG_WAITALL), "big")] = caller
    return peers


class PeerLink:
    """The connection to one peer: frames under way, and the ring buffers of both directions."""

    def __init__(self, peer: int, sock: socket.socket, outgoing: Tensor, incoming: Tensor) -> None:
        self.peer = peer
        self.sock = sock
        sock.setblocking(False)
        self.outbox = bytearray()
        self.inbox = bytearray()
        self.full = False  # the socket would not take all of the outbox
        self.lost = False  # the peer's process is gone
        self.outgoing = itertools.cycle(outgoing)  # the next slot to fill
        self.incoming = itertools.cycle(incoming)
        self.free = _SLOTS  # slots that may be filled
        self.reset()

    def reset(self) -> None:
        """Forget the messages of an earlier run; the slots stay what they are."""
        self.leaving: deque[Request] = deque()  # large messages whose receiver is ready
        self.left = 0  # bytes of the first
        self.arriving: Request | None = None
        self.arrived = 0  # bytes

    def put(self, kind: int, run: int, channel: int, count: int, body: bytes = b"") -> None:
        """Let a frame of this kind wait to leave: the run, the channel, a count, and a body."""
        self.outbox += _HEADER.pack(kind, channel, run, count) + body


class SocketEndpoint(Endpoint):
    """One rank's side: whichever of its threads waits drives all its sockets meanwhile."""

    def __init__(
        self, folder: str, rank: int, size: int, timeout: float, barrier: Callable[[], None]
    ) -> None:
        self.rank = rank
        self.timeout = timeout
        self.progress = open_memory(folder, size)
        shared = torch.frombuffer(self.progress.memory, dtype=torch.uint8, offset=_SLOTS_AT)
        slots = shared.view(size, size, _SLOTS, _SLOT)  # from, to
        self.links = {
            peer: PeerLink(peer, sock, slots[rank, peer], slots[peer, rank])
            for peer, sock in connect(folder, rank, size, barrier).items()
        }
        self.selector = selectors.DefaultSelector()
        for link in self.links.values():
            self.selector.register(link.sock, selectors.EVENT_READ, link)
        self.lock = threading.Lock()  # of everything below
        self.idle = threading.Condition(self.lock)
        self.driving = threading.Lock()
        self.watcher: threading.Thread | None = None
        self.reset(0)

    def reset(self, run: int) -> None:
        """Begin a run; of an earlier one's frames that are still on their way only FREE counts."""
        self.run = run
        self.stopped = False
        self.jobs: Counter[object] = Counter()  # of each Background that is busy
        self.moved = 0
        self.looks = 0
        self.progress.seen = None
        self.waiting: dict[Request, float] = {}
        self.watched: deque[Request] = deque()
        self.news = threading.Semaphore(0)  # of what is watched, which the watcher sleeps on
        self.sends: dict[tuple, deque[Request]] = defaultdict(deque)
        self.recvs: dict[tuple, deque[Request]] = defaultdict(deque)
        self.ready: dict[tuple, deque[str]] = defaultdict(deque)
        self.early: dict[tuple, deque[bytes]] = defaultdict(deque)
        for link in self.links.values():
            link.reset()

    def leave(self, over: bool) -> None:
        """As `Endpoint.leave`: what this rank has begun in a run goes on in no other."""
        self.stopped = True
        with self.idle:
            self.idle.wait_for(lambda: not self.jobs)
        if self.watcher is not None:
            self.news.release()
            self.watcher.join()
            self.watcher = None
        if over:
            self.progress.publish(self.rank, ENDED, 0, 0)

    # -- what Comm calls ---------------------------------------------------------------------------

    def post(self, *requests: Request) -> None:
        with self.lock:
            for request in requests:
                link, key = self.links[request.peer], (request.peer, request.channel)
                if request.sending:
                    self._post_send(link, key, request)
                else:
                    self._post_recv(link, key, request)
                self._flush(link)

    def _post_send(self, link: PeerLink, key: tuple, request: Request) -> None:
        if self.ready[key]:
            return self._matched(link, request, self.ready[key].popleft())
        pending = self.sends[key]
        first = not pending or pending[-1].state == "left"  # not past a large one that still waits
        if request.tensor.nbytes <= _SMALL and first:
            self._send_eagerly(link, request)
            request.state = "left"
        pending.append(request)

    def _post_recv(self, link: PeerLink, key: tuple, request: Request) -> None:
        call = request.call
        text = "\t".join((_form(request), call.signature, *map(str, call.where))).encode()
        link.put(_READY, self.run, request.channel, len(text), text)
        if self.early[key]:
            self._take_early(request, self.early[key].popleft())
        else:
            self.recvs[key].append(request)

    def until_done(self, request: Request) -> None:
        """As `Endpoint.until_done`. Raises what came in place of the message."""
        if not request.done:
            with self.lock:
                self.waiting[request] = time.monotonic() + self.timeout
            try:
                self._until(request)
            finally:
                with self.lock:
                    del self.waiting[request]
                    if self.looks and request.error is None:
                        self.looks = 0
                        self.progress.publish(self.rank, RUNNING, 0, self.moved)
        if request.error is not None:
            raise request.error

    def watch(self, request: Request) -> None:
        if not request.done:
            self.watched.append(request)
            self.news.release()
            if self.watcher is None:
                self.watcher = threading.Thread(target=self._watch, name="messages", daemon=True)
                self.watcher.start()

    def begin(self, worker: object) -> None:
        with self.lock:
            self.jobs[worker] += 1

    def finish(self, request: Request, worker: object) -> None:
        with self.lock:
            _done(request)
            self.jobs[worker] -= 1
            if not self.jobs[worker]:
                del self.jobs[worker]
                self.idle.notify()

    # -- waiting -----------------------------------------------------------------------------------

    def _until(self, request: Request) -> None:
        """Drive the sockets, or sleep while another thread does, until `request` is done.

        Who waits for an asynchronous collective leaves the driving to the thread that runs it,
        unless nothing is heard for a while: taking turns would cost a change of threads a message.
        """
        patient = request.tensor is NO_TENSOR
        while not request.done:
            if self.stopped:
                raise Stopped(str(request))
            if not patient and self.driving.acquire(blocking=False):
                try:
                    while not request.done and not self.stopped:
                        self._drive()
                finally:
                    self.driving.release()
                    self._hand_over()
                continue
            with self.lock:
                if request.done:
                    return
                request.wakeup = request.wakeup or threading.Event()
                if not patient and not self.driving.locked():
                    continue
            patient = request.wakeup.wait(_LOOK) and patient
            request.wakeup.clear()

    def _hand_over(self) -> None:
        """Wake another thread that waits, so that it drives."""
        with self.lock:
            for request in (*self.waiting, *self.watched):
                if request.tensor is not NO_TENSOR and request.wakeup and not request.done:
                    return request.wakeup.set()

    def _watch(self) -> None:
        watched, news = self.watched, self.news
        while news.acquire() and watched:
            try:
                self._until(watched[0])
            except Stopped:
                return
            watched.popleft()

    def _drive(self) -> None:
        """Move what can be moved; with nothing to move for a while, look around."""
        events = self.selector.select(_LOOK)
        with self.lock:
            if not events:
                self._look()
            for key, event in events:
                if event & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if event & selectors.EVENT_READ:
                    self._receive(key.data)

    def _look(self) -> None:
        """Has the run been stopped, does everybody wait, is the time up?"""
        self.stopped |= self.progress.stopped
        if self.stopped or not self.waiting:
            return
        self.looks += 1
        # Who has what it waited for may only be slow to go on.
        in_vain = sum(not request.done for request in self.waiting)
        blocked = in_vain > len(self.jobs)  # its program, and each busy Background
        self.progress.publish(self.rank, BLOCKED if blocked else RUNNING, self.looks, self.moved)
        if blocked and self.progress.deadlock():
            for request in self.waiting:
                _done(request, DeadlockError("every rank waits for another one", str(request)))
        for request, deadline in self.waiting.items():
            if not request.done and time.monotonic() > deadline:
                _done(request, out_of_time(self.timeout, request))

    # -- moving bytes (the lock is held) -----------------------------------------------------------

    def _matched(self, link: PeerLink, request: Request, receiver: str) -> None:
        """The receiver is ready for `request`: send it, or if it has left, let it be done."""
        form, signature, file, line, function = receiver.split("\t")
        if (form, signature) != (_form(request), request.call.signature):
            call = signature or f"recv({form}) from rank {self.rank}"
            _done(request, misfit(request, f"{call} at {place((file, int(line), function))}"))
        elif request.state == "left":
            _done(request)
        elif request.tensor.nbytes <= _SMALL:
            self._send_eagerly(link, request)
            _done(request)
        else:
            link.leaving.append(request)
            self._fill(link)

    def _send_eagerly(self, link: PeerLink, request: Request) -> None:
        x = request.tensor
        # Not by way of numpy, which would forbid its storage ever to be resized.
        body = ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b""
        link.put(_EAGER, self.run, request.channel, x.nbytes, body)

    def _fill(self, link: PeerLink) -> None:
        """Fill free slots with the next parts of what leaves, and tell the peer about each."""
        while link.free and link.leaving:
            request = link.leaving[0]
            data = request.tensor.view(-1).view(torch.uint8)[link.left : link.left + _SLOT]
            next(link.outgoing)[: len(data)].copy_(data)
            link.put(_PART, self.run, request.channel, len(data))
            link.free -= 1
            link.left += len(data)
            if link.left == request.tensor.nbytes:
                link.leaving.popleft()
                link.left = 0
                _done(request)
            self._flush(link)

    def _empty(self, link: PeerLink, key: tuple, count: int, current: bool) -> None:
        """Take the part in the next slot, and give the slot back."""
        slot = next(link.incoming)
        if current:
            request = link.arriving or self.recvs[key].popleft()
            link.arriving = request
            x = request.tensor
            theirs = slot[:count].view(x.dtype)
            request.accept(theirs, link.arrived // x.element_size())
            link.arrived += count
            if link.arrived == x.nbytes:
                link.arriving = None
                link.arrived = 0
                _done(request)
        link.put(_FREE, self.run, 0, 0)
        self._flush(link)

    def _take_early(self, request: Request, data: bytes) -> None:
        """Hand over an eager message; of one that does not fit its sender complains."""
        if len(data) == request.tensor.nbytes:
            if data:
                request.accept(torch.frombuffer(bytearray(data), dtype=request.tensor.dtype))
            _done(request)

    def _flush(self, link: PeerLink) -> None:
        """Write what waits for a peer, and be told when there is room for the rest."""
        if link.outbox and not link.lost:
            try:
                del link.outbox[: link.sock.send(link.outbox)]
                self.moved += 1
            except BlockingIOError:
                pass
            except OSError:
                return self._lost(link)
        if link.full != bool(link.outbox) and not link.lost:
            link.full = bool(link.outbox)
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self.selector.modify(link.sock, both if link.full else selectors.EVENT_READ, link)

    def _receive(self, link: PeerLink) -> None:
        """Read what a peer has written, and act on every whole frame of it."""
        try:
            news = link.sock.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            news = b""
        if not news:
            return self._lost(link)
        self.moved += 1
        link.inbox += news
        inbox, at = bytes(link.inbox), 0
        while len(inbox) - at >= _HEADER.size:
            kind, channel, run, count = _HEADER.unpack_from(inbox, at)
            body = at + _HEADER.size
            end = body + count * (kind in (_READY, _EAGER))
            if end > len(inbox):
                break
            at = end
            key, current = (link.peer, channel), run == self.run
            if kind == _FREE:
                link.free += 1
                self._fill(link)
            elif kind == _PART:
                self._empty(link, key, count, current)
            elif current and kind == _READY:
                self._heard_ready(link, key, inbox[body:end].decode())
            elif current and self.recvs[key]:
                self._take_early(self.recvs[key].popleft(), inbox[body:end])
            elif current:
                self.early[key].append(inbox[body:end])
        del link.inbox[:at]

    def _heard_ready(self, link: PeerLink, key: tuple, receiver: str) -> None:
        if self.sends[key]:
            self._matched(link, self.sends[key].popleft(), receiver)
            self._flush(link)
        else:
            self.ready[key].append(receiver)

    def _lost(self, link: PeerLink) -> None:
        """A peer's process is gone: whoever runs the ranks sees that too, and stops this one."""
        link.lost = True
        link.outbox.clear()
        self.selector.unregister(link.sock)


def _form(request: Request) -> str:
    """What both sides of a message must agree on."""
    x = request.tensor
    return f"{str(x.dtype).removeprefix('torch.')}[{x.numel()} elements]"


def _done(request: Request, error: Exception | None = None) -> None:
    request.error = error or request.error
    request.done = True
    if request.wakeup is not None:
        request.wakeup.set()
