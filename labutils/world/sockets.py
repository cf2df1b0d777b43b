"""Messages between processes of one machine, over a socket for each pair of ranks.

A receiver says READY when it has room; only then does the sender send the DATA. So a send is a rendezvous, no message waits in a stream
in front of another one, and the sender knows that dtype and length fit. A small message leaves at once, and is done when READY comes.
"""

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from labutils.world.board import BLOCKED, FAILED, FINISHED, RUNNING, Board
from labutils.world.comm import REDUCE, Op, misfit
from labutils.world.errors import DeadlockError, Site, Stopped, TimeoutError, late, place, stuck

_FRAME = struct.Struct("<BBBxIQH")  # kind, channel, dtype, run, elements (READY) or bytes (DATA), bytes of call site that follow
_READY, _DATA = 0, 1
_SEGMENT = 1 << 20  # bytes moved before looking at the other direction
_EAGER = 1 << 13  # a message of so few bytes does not wait for READY to leave, only to be done
_LOOK = 0.02  # seconds without news after which a waiting rank looks at the board
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.complex32,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Arrival:
    """A message on its way in: where its next bytes go, and what is done with them once they are there."""

    def __init__(self, op: Op | None, nbytes: int, scratch: Tensor, memory: memoryview) -> None:
        self.op, self.nbytes, self.got, self.base, self.scratch, self.memory = op, nbytes, 0, 0, scratch, memory
        self.view = raw(op.tensor) if op and not op.reduce else None

    def forget(self) -> None:
        """Let the rest come in, and ignore it."""
        self.op = self.view = None
        self.base = self.got

    def room(self) -> memoryview:
        """The memory for what comes next."""
        if self.view is not None:
            return self.view[self.got :]
        return self.memory[self.got - self.base : min(_SEGMENT, self.nbytes - self.base)]

    def took(self, count: int) -> None:
        """`count` bytes have come: reduce the whole elements among them while they are in cache and the next ones are on their way."""
        self.got += count
        if self.op is None:
            self.base = self.got
        elif self.view is None:
            dtype = self.op.tensor.dtype
            first, last = self.base // dtype.itemsize, self.got // dtype.itemsize
            left = self.got - last * dtype.itemsize
            if last > first:
                theirs = self.scratch[: (last - first) * dtype.itemsize].view(dtype)
                with torch.no_grad():
                    REDUCE[self.op.reduce](self.op.tensor.view(-1)[first:last], theirs)
                self.memory[:left] = bytes(self.memory[self.got - self.base - left : self.got - self.base])
                self.base = self.got - left


class Link:
    """The socket to one peer, what waits to be written to it, and what has come out of it so far."""

    def __init__(self, peer: int, sock: socket.socket) -> None:
        self.peer, self.sock = peer, sock
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SEGMENT)
        self.outbox: deque[list] = deque()  # [bytes, the op that is done when they are out, a frame begins here and is untouched]
        self.inbox = bytearray(1 << 14)
        self.filled = 0
        self.arrival: Arrival | None = None
        self.scratch = torch.empty(_SEGMENT, dtype=torch.uint8)
        self.memory = raw(self.scratch)
        self.lost = self.full = False  # full: more is waiting than the socket would take

    def put(self, frame: bytes, payload: memoryview | None = None, op: Op | None = None) -> None:
        self.outbox.append([memoryview(frame), op if not payload else None, True])
        if payload:
            self.outbox.append([payload, op, False])


def _first(outbox: Iterable[list]) -> list[memoryview]:
    """What to write next, about a segment: some small pieces, or the beginning of a large one."""
    buffers, total = [], 0
    for view, _, _ in itertools.islice(outbox, 8):
        buffers.append(view[: _SEGMENT - total])
        total += len(buffers[-1])
        if total == _SEGMENT:
            break
    return buffers


def raw(x: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return memoryview(x.view(-1).view(torch.uint8).numpy()) if x.numel() else memoryview(b"")


class SocketEndpoint:
    """One rank's side: whichever of its threads waits drives all its sockets until its own message is through."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], board: Board, timeout: float) -> None:
        self.rank, self.board, self.timeout = rank, board, timeout
        self.links = {peer: Link(peer, sock) for peer, sock in sockets.items()}
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
        """Forget what an earlier run left behind; a frame that is half out or half in is finished, and then ignored."""
        self.run, self.stopped, self.actors, self.moved, self.looks = run, False, 1, 0, 0
        self.waiting: dict[Op, float] = {}
        self.to_watch: deque[Op] = deque()
        self.sends: dict[tuple, deque[Op]] = defaultdict(deque)
        self.recvs: dict[tuple, deque[Op]] = defaultdict(deque)
        self.ready: dict[tuple, deque[tuple]] = defaultdict(deque)
        self.early: dict[tuple, deque[bytes]] = defaultdict(deque)
        self.snapshot: tuple = ()
        for link in self.links.values():
            begun = link.outbox.popleft() if link.outbox and link.outbox[0][2] is not True else None
            rest = list(itertools.takewhile(lambda entry: entry[2] is False, link.outbox)) if begun else []
            link.outbox = deque([begun, *rest] if begun else ())
            if link.arrival is not None:
                link.arrival.forget()

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
                if not op.sending:
                    where = b"" if op.call.detail else "\t".join(map(str, op.call.where)).encode()[:1000]
                    link.put(_FRAME.pack(_READY, op.channel, _CODES[op.tensor.dtype], self.run, op.tensor.numel(), len(where)) + where)
                    if self.early[key]:
                        self._keep(op, self.early[key].popleft())
                    else:
                        self.recvs[key].append(op)
                elif self.ready[key]:
                    self._ready(link, op, *self.ready[key].popleft())
                else:
                    pending = self.sends[key]
                    if op.tensor.nbytes <= _EAGER and (not pending or pending[-1].state):
                        op.state = "sent"
                        self._data(link, op)
                    pending.append(op)
                self._flush(link)
            if self.driving.locked():
                with contextlib.suppress(BlockingIOError):
                    os.write(self.bell, b"!")

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
        """Drive the sockets, or sleep while another thread does, until `op` is done."""
        while not op.done:
            if self.stopped:
                raise Stopped
            if self.driving.acquire(blocking=False):
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
                    if not self.driving.locked():
                        continue
                op.gate.wait(_LOOK)
                op.gate.clear()

    def _hand_over(self) -> None:
        """Wake another thread that waits, so that it drives."""
        with self.lock:
            sleeper = next((op for op in (*self.waiting, *self.to_watch) if op.gate is not None and not op.done), None)
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
            self.board.publish(self.rank, BLOCKED if blocked else RUNNING, self.looks, self.moved, str(first))
            if blocked and self._deadlock():
                for op in self.waiting:
                    self._done(op, DeadlockError(stuck(self.board.states())))
            for op, deadline in self.waiting.items():
                if not op.done and time.monotonic() > deadline:
                    self._done(op, TimeoutError(late(op.call.op, self.timeout, self.board.states())))

    def _deadlock(self) -> bool:
        """Whether every rank has looked twice, in vain, since nothing moved anywhere: what could come would have come."""
        states = [self.board.state(rank)[:3] for rank in range(self.board.size)]
        if any(state == RUNNING for state, _, _ in states):
            self.snapshot = ()
            return False
        now = tuple((state, moved) for state, _, moved in states)
        if not self.snapshot or self.snapshot[0] != now:
            self.snapshot = now, [looks for _, looks, _ in states]
        return all(state in (FINISHED, FAILED) or looks >= before + 2 for (state, looks, _), before in zip(states, self.snapshot[1], strict=True))

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
            self._done(op, misfit(self.rank, op, link.peer, f"recv({kind}[{numel} elements]) from rank {self.rank}{at}"))
        elif op.state:
            self._done(op)
        else:
            self._data(link, op)

    def _data(self, link: Link, op: Op) -> None:
        frame, payload = _FRAME.pack(_DATA, op.channel, 0, self.run, op.tensor.nbytes, 0), raw(op.tensor)
        if op.state:
            link.put(frame + payload)
        else:
            link.put(frame, payload, op)

    def _keep(self, op: Op, data: bytes) -> None:
        """Hand over a message that was there before its receiver; one that does not fit is left to its sender to complain about."""
        if len(data) == op.tensor.nbytes:
            theirs = torch.frombuffer(bytearray(data), dtype=op.tensor.dtype) if data else op.tensor.view(-1)
            with torch.no_grad():
                REDUCE[op.reduce or "copy"](op.tensor.view(-1), theirs)
            self._done(op)

    def _flush(self, link: Link) -> None:
        """Write some of what waits for a peer, and be told when there is room for more."""
        outbox = link.outbox
        if outbox and not link.lost:
            try:
                count = link.sock.sendmsg(_first(outbox))
            except BlockingIOError:
                count = -1
            except OSError:
                return self._lost(link)
            if count >= 0:
                self.moved += 1
                while outbox and count >= len(outbox[0][0]):
                    view, op, _ = outbox.popleft()
                    count -= len(view)
                    if op is not None:
                        self._done(op)
                if count:
                    outbox[0][0], outbox[0][2] = outbox[0][0][count:], None
        if link.full != bool(outbox) and not link.lost:
            link.full = bool(outbox)
            self.poller.modify(link.sock, select.POLLIN | select.POLLOUT if outbox else select.POLLIN)

    def _receive(self, link: Link) -> None:
        """Read some of what a peer has sent."""
        arrival = link.arrival
        try:
            count = link.sock.recv_into(arrival.room() if arrival is not None else memoryview(link.inbox)[link.filled :])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            return self._lost(link)
        self.moved += 1
        if arrival is not None:
            arrival.took(count)
            self._arrived(link)
        else:
            link.filled += count
            self._parse(link)

    def _parse(self, link: Link) -> None:
        """Take whole frames from the front of what has come."""
        inbox, at = memoryview(link.inbox), 0
        while link.filled - at >= _FRAME.size:
            kind, channel, code, run, count, extra = _FRAME.unpack_from(inbox, at)
            if link.filled - at < _FRAME.size + extra:
                break
            at += _FRAME.size
            where = bytes(inbox[at : at + extra]).decode()
            at += extra
            key = (link.peer, channel)
            if kind == _DATA:
                wanted = self.recvs[key] if run == self.run else ()
                if not wanted and run == self.run and count <= link.filled - at:
                    self.early[key].append(bytes(inbox[at : at + count]))
                    at += count
                    continue
                if not wanted and run == self.run:
                    at -= _FRAME.size  # an early message is kept in one piece: wait for the rest of it
                    break
                op = wanted.popleft() if wanted else None
                fits = op is not None and op.tensor.nbytes == count
                link.arrival = Arrival(op if fits else None, count, link.scratch, link.memory)
                while link.arrival.got < count and at < link.filled:
                    room = link.arrival.room()
                    part = min(len(room), link.filled - at)
                    room[:part] = inbox[at : at + part]
                    link.arrival.took(part)
                    at += part
                self._arrived(link)
                if link.arrival is not None:
                    break
            elif run == self.run:
                file, line, function = where.split("\t") if where else ("", "0", "")
                message = code, count, (file, int(line), function) if where else None
                if self.sends[key]:
                    self._ready(link, self.sends[key].popleft(), *message)
                    self._flush(link)
                else:
                    self.ready[key].append(message)
        inbox[: link.filled - at] = bytes(inbox[at : link.filled])
        link.filled -= at

    def _arrived(self, link: Link) -> None:
        arrival = link.arrival
        if arrival.got == arrival.nbytes:
            link.arrival = None
            if arrival.op is not None:
                self._done(arrival.op)

    def _lost(self, link: Link) -> None:
        """A peer's process is gone: whoever runs the ranks sees that too, and stops this one."""
        link.lost = True
        link.outbox.clear()
        self.poller.unregister(link.sock)
