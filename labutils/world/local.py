"""Messages between processes of one machine: a socket for each pair of ranks says what is there, shared memory holds it.

A receiver says READY when it has room; only then does the sender copy its DATA, a PART at a time, into a few slots of shared memory, each of
which the receiver empties, or adds to its own tensor, and gives back as FREE. So a send is a rendezvous, no message waits in front of another
one, adding overlaps with receiving, and the sender knows that dtype and length fit. A small message goes through the socket at once, and is
done when READY comes.
"""

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping

import torch
from torch import Tensor

from labutils.world.board import BLOCKED, FAILED, FINISHED, RUNNING, Board
from labutils.world.comm import REDUCE, Op, misfit
from labutils.world.errors import DeadlockError, Site, Stopped, TimeoutError, late, place, stuck

_FRAME = struct.Struct(
    "<BBBxIQH"
)  # kind, channel, dtype, run, elements (READY) or bytes (DATA, PART), bytes of call site that follow
_READY, _DATA, _PART, _FREE = range(4)
_SLOT, _SLOTS = (
    1 << 20,
    4,
)  # bytes in a slot: each costs a look at the sockets, so not too few; slots for each direction of a pair
_SMALL = 1 << 13  # up to so many bytes go through the socket
_LOOK = 0.02  # seconds without news after which a waiting rank looks at the board
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def nbytes(size: int) -> int:
    """Bytes of memory that `size` ranks share: a board, and slots for every pair; what is never touched takes no room."""
    return _slots_at(size) + size * size * _SLOTS * _SLOT


def _slots_at(size: int) -> int:
    return -(-Board.nbytes(size) // 4096) * 4096


class Link:
    """The way to one peer and back: what waits to leave, what has come in part, and the slots of both directions."""

    def __init__(self, peer: int, sock: socket.socket, outgoing: Tensor, incoming: Tensor) -> None:
        self.peer, self.sock, self.outgoing, self.incoming = peer, sock, outgoing, incoming
        sock.setblocking(False)
        self.outbox, self.inbox = bytearray(), bytearray()
        self.full = self.lost = False  # full: the socket would not take all of the outbox
        self.free, self.filled, self.emptied = (
            _SLOTS,
            0,
            0,
        )  # slots that may be filled; how many were, and how many of the peer's were emptied
        self.leaving: deque[Op] = (
            deque()
        )  # large messages whose receiver is ready, and how many bytes of the first have left
        self.arriving: deque[Op] = (
            deque()
        )  # large messages that have been announced, and how many bytes of the first have come
        self.gone = self.got = 0


class LocalEndpoint:
    """One rank's side: whichever of its threads waits drives all its sockets until its own message is through."""

    def __init__(
        self, rank: int, sockets: Mapping[int, socket.socket], board: Board, timeout: float
    ) -> None:
        self.rank, self.board, self.timeout = rank, board, timeout
        shared = torch.frombuffer(board.memory, dtype=torch.uint8, offset=_slots_at(board.size))
        slots = shared.view(board.size, board.size, _SLOTS, _SLOT)  # from, to
        self.links = {
            peer: Link(peer, sock, slots[rank, peer], slots[peer, rank])
            for peer, sock in sockets.items()
        }
        self.lock, self.driving = threading.Lock(), threading.Lock()
        self.alarm, self.bell = os.pipe()
        os.set_blocking(self.alarm, False)
        os.set_blocking(self.bell, False)
        self.poller = select.poll()
        self.poller.register(self.alarm, select.POLLIN)
        self.by_fd = {link.sock.fileno(): link for link in self.links.values()}
        for fd in self.by_fd:
            self.poller.register(fd, select.POLLIN)
        self.watched: threading.Thread | None = None
        self.reset(0)

    def reset(self, run: int) -> None:
        """Forget what an earlier run left behind; of its frames that are still on their way only FREE counts."""
        self.run, self.stopped, self.actors, self.moved, self.looks = run, False, 1, 0, 0
        self.waiting: dict[Op, float] = {}
        self.to_watch: deque[Op] = deque()
        self.sends: dict[tuple, deque[Op]] = defaultdict(deque)
        self.recvs: dict[tuple, deque[Op]] = defaultdict(deque)
        self.ready: dict[tuple, deque[tuple]] = defaultdict(deque)
        self.early: dict[tuple, deque[bytes]] = defaultdict(deque)
        self.snapshot: tuple = ()
        for link in self.links.values():
            link.leaving.clear()
            link.arriving.clear()
            link.gone = link.got = 0

    def stop(self) -> None:
        """End what still goes on in the background."""
        self.stopped = True
        if self.watched is not None:
            self.watched.join(1)

    # -- what Comm calls -----------------------------------------------------------------------------------------------

    def post(self, *ops: Op) -> None:
        with self.lock:
            for op in ops:
                link, key = self.links[op.peer], (op.peer, op.channel)
                if op.sending:
                    self._post_send(link, key, op)
                else:
                    self._post_recv(link, key, op)
                self._flush(link)
            if self.driving.locked():
                with contextlib.suppress(BlockingIOError):
                    os.write(self.bell, b"!")

    def _post_send(self, link: Link, key: tuple, op: Op) -> None:
        if self.ready[key]:
            self._ready(link, op, *self.ready[key].popleft())
            return
        pending = self.sends[key]
        if op.tensor.nbytes <= _SMALL and (
            not pending or pending[-1].state
        ):  # never past a large message that still waits
            op.state = "left"
            self._leave(link, op)
        pending.append(op)

    def _post_recv(self, link: Link, key: tuple, op: Op) -> None:
        where = b"" if op.call.detail else "\t".join(map(str, op.call.where)).encode()[:1000]
        link.outbox += (
            _FRAME.pack(
                _READY, op.channel, _CODES[op.tensor.dtype], self.run, op.tensor.numel(), len(where)
            )
            + where
        )
        if self.early[key]:
            self._take_small(op, self.early[key].popleft())
        else:
            self.recvs[key].append(op)

    def wait(self, op: Op) -> None:
        if not op.done:
            self._wait(op)
        if op.error is not None:
            raise op.error

    def watch(self, op: Op) -> None:
        if not op.done:
            self.to_watch.append(op)
            if self.watched is None or not self.watched.is_alive():
                self.watched = threading.Thread(target=self._watch, name="messages", daemon=True)
                self.watched.start()

    def finish(self, op: Op) -> None:
        with self.lock:
            self._done(op)

    def add_actor(self, step: int) -> None:
        with self.lock:
            self.actors += step

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _wait(self, op: Op) -> None:
        with self.lock:
            self.waiting[op] = time.monotonic() + self.timeout
        try:
            self._until(op)
        finally:
            with self.lock:
                del self.waiting[op]
                if self.looks and op.error is None:
                    self.looks = 0
                    self.board.publish(self.rank, RUNNING, 0, self.moved, "")

    def _until(self, op: Op) -> None:
        """Drive the sockets, or sleep while another thread does, until `op` is done.

        Who waits for an asynchronous collective leaves the driving to the thread that runs it, unless nothing is heard for a while: were the
        two to take turns, each message would cost a change of threads.
        """
        patient = op.tensor is None
        while not op.done:
            if self.stopped:
                raise Stopped
            if not patient and self.driving.acquire(blocking=False):
                try:
                    while not op.done and not self.stopped:
                        self._drive()
                finally:
                    self.driving.release()
                    self._hand_over()
            else:
                with self.lock:
                    if op.done:
                        return
                    op.gate = op.gate or threading.Event()
                    if not patient and not self.driving.locked():
                        continue
                patient = op.gate.wait(_LOOK) and patient
                op.gate.clear()

    def _hand_over(self) -> None:
        """Wake another thread that waits, so that it drives."""
        with self.lock:
            sleeper = next(
                (
                    op
                    for op in (*self.waiting, *self.to_watch)
                    if op.tensor is not None and op.gate is not None and not op.done
                ),
                None,
            )
        if sleeper is not None:
            sleeper.gate.set()

    def _watch(self) -> None:
        while self.to_watch:
            try:
                self._until(self.to_watch[0])
            except Stopped:
                return
            self.to_watch.popleft()

    def _drive(self) -> None:
        """Move what can be moved; with nothing to move for a while, look at the board."""
        events = self.poller.poll(_LOOK * 1000)
        if not events:
            self._look()
        for fd, event in events:
            if fd == self.alarm:
                os.read(fd, 4096)
                continue
            link = self.by_fd[fd]
            with self.lock:
                if event & select.POLLOUT:
                    self._flush(link)
                if event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._receive(link)

    def _look(self) -> None:
        """Nothing moved: has the run been stopped, does everybody wait, is the time up?"""
        with self.lock:
            if self.board.stopped:
                self.stopped = True
                for sleeper in (*self.waiting, *self.to_watch):
                    if sleeper.gate is not None:
                        sleeper.gate.set()
                return
            if not self.waiting:
                return
            self.looks += 1
            blocked = len(self.waiting) >= self.actors
            first = next(iter(self.waiting))
            self.board.publish(
                self.rank, BLOCKED if blocked else RUNNING, self.looks, self.moved, str(first)
            )
            if blocked and self._deadlock():
                for op in self.waiting:
                    self._done(op, DeadlockError(stuck(self.board.states())))
            for op, deadline in self.waiting.items():
                if not op.done and time.monotonic() > deadline:
                    self._done(
                        op, TimeoutError(late(op.call.op, self.timeout, self.board.states()))
                    )

    def _deadlock(self) -> bool:
        """Whether every rank has looked twice, in vain, since nothing moved anywhere: what could come would have come."""
        states = [self.board.state(rank)[:3] for rank in range(self.board.size)]
        if any(state == RUNNING for state, _, _ in states):
            self.snapshot = ()
            return False
        now = tuple((state, moved) for state, _, moved in states)
        if not self.snapshot or self.snapshot[0] != now:
            self.snapshot = now, [looks for _, looks, _ in states]
        return all(
            state in (FINISHED, FAILED) or looks >= before + 2
            for (state, looks, _), before in zip(states, self.snapshot[1], strict=True)
        )

    # -- moving bytes (the lock is held) -------------------------------------------------------------------------------

    def _done(self, op: Op, error: Exception | None = None) -> None:
        op.error, op.done = error or op.error, True
        if op.gate is not None:
            op.gate.set()

    def _ready(self, link: Link, op: Op, code: int, numel: int, where: Site | None) -> None:
        """The receiver is ready for `op`: send it, or if it has left already, let it be done."""
        if _CODES[op.tensor.dtype] != code or op.tensor.numel() != numel:
            kind = str(_DTYPES[code]).removeprefix("torch.")
            at = f" at {place(where)}" if where else f" inside {op.call.op}"
            self._done(
                op,
                misfit(
                    self.rank,
                    op,
                    link.peer,
                    f"recv({kind}[{numel} elements]) from rank {self.rank}{at}",
                ),
            )
        elif op.state:
            self._done(op)
        else:
            self._leave(link, op)

    def _leave(self, link: Link, op: Op) -> None:
        """Send a small message at once, a large one as slots become free."""
        frame = _FRAME.pack(_DATA, op.channel, 0, self.run, op.tensor.nbytes, 0)
        if op.tensor.nbytes > _SMALL:
            link.outbox += frame
            link.leaving.append(op)
            self._fill(link)
        else:
            link.outbox += frame + _raw(op.tensor)
            if not op.state:
                self._done(op)

    def _fill(self, link: Link) -> None:
        """Fill free slots with the next parts of the messages that leave, and tell the peer about each at once."""
        while link.free and link.leaving:
            op = link.leaving[0]
            total = op.tensor.nbytes
            count = min(_SLOT, total - link.gone)
            link.outgoing[link.filled % _SLOTS, :count].copy_(
                op.tensor.view(-1).view(torch.uint8)[link.gone : link.gone + count]
            )
            link.outbox += _FRAME.pack(_PART, op.channel, 0, self.run, count, 0)
            link.free, link.filled, link.gone = link.free - 1, link.filled + 1, link.gone + count
            if link.gone == total:
                link.leaving.popleft()
                link.gone = 0
                self._done(op)
            self._flush(link)

    def _empty(self, link: Link, count: int, current: bool) -> None:
        """Take the part in the next slot, and give the slot back."""
        if current:
            op = link.arriving[0]
            theirs = link.incoming[link.emptied % _SLOTS, :count].view(op.tensor.dtype)
            first = link.got // op.tensor.element_size()
            with torch.no_grad():
                REDUCE[op.reduce or "copy"](op.tensor.view(-1)[first : first + len(theirs)], theirs)
            link.got += count
            if link.got == op.tensor.nbytes:
                link.arriving.popleft()
                link.got = 0
                self._done(op)
        link.emptied += 1
        link.outbox += _FRAME.pack(_FREE, 0, 0, self.run, 0, 0)
        self._flush(link)

    def _take_small(self, op: Op, data: bytes) -> None:
        """Hand over a small message; one that does not fit is left to its sender to complain about."""
        if len(data) == op.tensor.nbytes:
            if data:
                with torch.no_grad():
                    REDUCE[op.reduce or "copy"](
                        op.tensor.view(-1), torch.frombuffer(bytearray(data), dtype=op.tensor.dtype)
                    )
            self._done(op)

    def _flush(self, link: Link) -> None:
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
            self.poller.modify(
                link.sock, select.POLLIN | select.POLLOUT if link.full else select.POLLIN
            )

    def _receive(self, link: Link) -> None:
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
        while len(inbox) - at >= _FRAME.size:
            kind, channel, code, run, count, extra = _FRAME.unpack_from(inbox, at)
            body = at + _FRAME.size
            end = body + (count if kind == _DATA and count <= _SMALL else extra)
            if end > len(inbox):
                break
            at = end
            key, current = (link.peer, channel), run == self.run
            if kind == _FREE:
                link.free += 1
                self._fill(link)
            elif kind == _PART:
                self._empty(link, count, current)
            elif not current:
                pass  # what an earlier run said or sent
            elif kind == _READY:
                self._heard_ready(link, key, code, count, inbox[body:end].decode())
            elif count > _SMALL:
                link.arriving.append(self.recvs[key].popleft())
            elif self.recvs[key]:
                self._take_small(self.recvs[key].popleft(), inbox[body:end])
            else:
                self.early[key].append(inbox[body:end])
        del link.inbox[:at]

    def _heard_ready(self, link: Link, key: tuple, code: int, numel: int, where: str) -> None:
        file, line, function = where.split("\t") if where else ("", "0", "")
        message = code, numel, (file, int(line), function) if where else None
        if self.sends[key]:
            self._ready(link, self.sends[key].popleft(), *message)
            self._flush(link)
        else:
            self.ready[key].append(message)

    def _lost(self, link: Link) -> None:
        """A peer's process is gone: whoever runs the ranks sees that too, and stops this one."""
        link.lost = True
        link.outbox.clear()
        self.poller.unregister(link.sock)


def _raw(x: Tensor) -> bytes:
    """The bytes of a contiguous tensor. Not by way of numpy, which would forbid its storage ever to be resized."""
    return ctypes.string_at(x.data_ptr(), x.nbytes) if x.numel() else b""
