"""Which exercises are done: a file on this machine, written when a check passes in a notebook.

    python -m labutils.teach.progress

Nothing is sent anywhere. A notebook shows nothing of it that nobody asked for, but how long a cell
has been computing, while it does.
"""

import builtins
import contextlib
import contextvars
import html
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labutils.teach import exercises


def kept_in() -> pathlib.Path:
    """Where the file lies: `$LABUTILS_PROGRESS`, or the user's folder for the state of programs."""
    if named := os.environ.get("LABUTILS_PROGRESS"):
        return pathlib.Path(named)
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return pathlib.Path(state).expanduser() / "labutils" / "progress.json"


def solved() -> dict[str, str]:
    """When each exercise was solved first, as text; nothing where no file can be read."""
    try:
        file = kept_in()
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError, RuntimeError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(exercise): str(when) for exercise, when in found.items()}


def remember(exercise: str) -> None:
    """Keep that an exercise is solved, where a learner works: in IPython and its notebooks.

    A file that cannot be written is no reason to disturb a learner: then nothing is kept.
    """
    if not hasattr(builtins, "__IPYTHON__") or exercise in (before := solved()):
        return
    with contextlib.suppress(OSError, RuntimeError):
        file = kept_in()
        if file.exists() and not file.is_file():  # such as /dev/null: keep nothing, then
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.{os.getpid()}")
        when = time.strftime("%Y-%m-%d %H:%M")
        beside.write_text(json.dumps(before | {exercise: when}, indent=1), encoding="utf-8")
        os.replace(beside, file)


class Waiting:
    """Says while a cell computes how long it has, and takes that back when the cell ends.

    say: is given the text to show, "" to take it back, and whether it is the first one
    after, every: seconds until it says so, and from then on between two times
    """

    def __init__(
        self, say: Callable[[str, bool], object], after: float = 5, every: float = 1
    ) -> None:
        self.say, self.after, self.every = say, after, every
        self.ended, self.thread = threading.Event(), threading.Thread()

    def begin(self) -> None:
        """A cell begins; what is shown from now on is shown below it."""
        self.ended = threading.Event()
        run = contextvars.copy_context().run
        self.thread = threading.Thread(target=run, args=(self._tell, self.ended), daemon=True)
        self.thread.start()

    def end(self) -> None:
        """It ends, and what was said is taken back."""
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join()

    def _tell(self, ended: threading.Event) -> None:
        began, said = time.monotonic(), False
        while not ended.wait(self.every if said else self.after):
            self.say(f"computing · {time.monotonic() - began:.0f} s", not said)
            said = True
        if said:
            self.say("", False)


class _Line:
    """The line below a cell that computes: it goes before the cell's first own output, or when the
    cell ends, so that nothing of it is stored with the notebook."""

    OUTPUTS = ("stream", "display_data", "execute_result", "error")

    def __init__(self, shell: Any) -> None:
        self.kernel, self.publisher = shell.kernel, shell.display_pub
        self.lock, self.shown, self.spoken = threading.Lock(), False, False
        self.parent: dict[str, Any] = {}
        self.send, self.kernel.session.send = self.kernel.session.send, self._sending

    def begin(self) -> None:
        """A cell begins, and has shown nothing yet."""
        with self.lock:
            self.shown, self.spoken = False, False
            self.parent = self.kernel.get_parent()

    def say(self, text: str, first: bool = False) -> None:
        """Show a text, unless the cell has shown something itself; "" takes it back."""
        # In the thread that sends what was printed, or one could overtake the other.
        self.publisher.pub_socket.io_thread.schedule(lambda: self._say(text))

    def _say(self, text: str) -> None:
        with self.lock:
            if not text:
                self._take_back()
            elif not self.spoken:
                self._publish(text)

    def _publish(self, text: str) -> None:
        # Not by `display`, which waits until all that was printed is sent.
        shown = {"text/html": f'<span style="color:#6B7280">{text}</span>', "text/plain": text}
        place = {"display_id": f"computing-{self.parent['header']['msg_id']}"}
        kind = "update_display_data" if self.shown else "display_data"
        self._tell(kind, {"data": shown, "metadata": {}, "transient": place})
        self.shown = True

    def _take_back(self) -> None:
        """The line is all that there is: clear the output."""
        if self.shown:
            self._tell("clear_output", {"wait": False})
            self.shown = False

    def _tell(self, kind: str, content: dict[str, Any]) -> None:
        to = self.publisher
        self.send(to.pub_socket, kind, content, parent=self.parent, ident=to.topic)

    def _sending(self, socket: Any, message: Any, *arguments: Any, **options: Any) -> Any:
        """What the kernel sends to the front end, after the line is gone."""
        kind = message if isinstance(message, str) else message["header"]["msg_type"]
        if kind in self.OUTPUTS:
            with self.lock:
                self._take_back()
                self.spoken = True
        return self.send(socket, message, *arguments, **options)


def watch(shell: Any = None, after: float = 5) -> None:
    """From now on a cell of this notebook says how long it takes, once that is `after` seconds, and
    until it shows something itself.

    It does where somebody watches, that is where the front end takes input, as JupyterLab does.
    What executes notebooks (nbclient, nbval) takes none, and so stores nothing of it.
    """
    if shell is None and hasattr(builtins, "__IPYTHON__"):
        from IPython import get_ipython

        shell = get_ipython()
    if not hasattr(shell, "kernel") or hasattr(shell, "waiting"):
        return
    line = _Line(shell)

    def begin(cell: Any) -> None:
        if shell.kernel.get_parent().get("content", {}).get("allow_stdin"):
            line.begin()
            clock.begin()

    clock = shell.waiting = Waiting(line.say, after)
    shell.events.register("pre_run_cell", begin)
    shell.events.register("post_run_cell", lambda result: clock.end())


@dataclass(frozen=True)
class Overview:
    """What is solved, by lab, and what comes next."""

    when: dict[str, str]

    def _lines(self) -> list[tuple[str, str, str]]:
        """(lab, how many, the first that is open) of every lab."""
        labs: dict[str, list[exercises.Card]] = {}
        for card in exercises.cards():
            labs.setdefault(card.lab, []).append(card)
        lines = []
        for lab, cards in labs.items():
            left = [card for card in cards if card.exercise not in self.when]
            lines.append((lab, f"{len(cards) - len(left)} of {len(cards)}", _spoken(left)))
        return lines

    def _ends(self) -> str:
        cards = {card.exercise: card for card in exercises.cards()}
        done = {exercise: when for exercise, when in self.when.items() if exercise in cards}
        said = f"{len(done)} of {len(cards)} exercises are solved."
        if not done:
            return f"{said} A check that passes in a notebook is kept in {kept_in()}."
        last = cards[max(done, key=done.__getitem__)]
        left = [c for c in cards.values() if c.lab == last.lab and c.exercise not in done]
        went_on = f" It goes on with {_spoken(left)}." if left else " That lab is done."
        return f"{said} The last was {last.number}, in {last.lab}.{went_on}"

    def __str__(self) -> str:
        lines = [f"{lab:22} {many:7} {left}".rstrip() for lab, many, left in self._lines()]
        return "\n".join([*lines, self._ends()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            "<tr>"
            + "".join(f"<td style='text-align:left'>{html.escape(text)}</td>" for text in line)
            for line in self._lines()
        ]
        head = "<tr><th>lab</th><th>solved</th><th>next</th></tr>"
        return f"<table>{head}{''.join(rows)}</table><p>{html.escape(self._ends())}</p>"


def _spoken(left: list[exercises.Card]) -> str:
    if not left:
        return ""
    return f"{left[0].number} · {left[0].title} ({left[0].minutes} min)"


def overview() -> Overview:
    """What is solved so far, as a table in a notebook and as text in a terminal."""
    return Overview(solved())


if __name__ == "__main__":
    print(overview())
