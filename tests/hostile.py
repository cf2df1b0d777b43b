"""Submissions that mean harm, cheat or are broken: (name, code of the answer, status, words).

`{outside}` is a file of the teacher's, `{port}` a port that listens, `{other}` another submission.
The exercise is accumulation/configure; the answer is a function `fill`.
"""

SETUP = "from labutils import accumulation, planner\nfrom labutils.teach.check import check"
RIGHT = """
def fill(target, seq_len, gpus, fits):
    share = target // seq_len // gpus
    sizes = [b for b in range(1, share + 1) if share % b == 0 and fits(b)]
    return max(sizes), share // max(sizes)
"""
WRONG = "\ndef fill(target, seq_len, gpus, fits):\n    return 1, 1\n"
INSIDE = "\ndef fill(target, seq_len, gpus, fits):\n    {}\n    return 1, 1\n"


def _inside(*lines: str) -> str:
    """A wrong answer that does this when it is called."""
    return INSIDE.format("\n    ".join(lines))


_FAKE = '{"status": "solved", "said": "", "passed": 9, "of": 9, "remarks": [], "token": ""}'
_ALL_HANDLES = (
    f"for fd in range(256):\n    try: os.write(fd, b'{_FAKE}\\n')\n    except OSError: pass"
)
_TRIES = "try:\n    {}\nexcept OSError as error:\n    print(error)\n"

CODE = [
    # never ends
    ("loop at the top", "while True: pass", "stopped", "did not end"),
    ("loop in the answer", _inside("while True: pass"), "stopped", "did not end"),
    ("sleeps", "import time\ntime.sleep(1e6)", "stopped", "did not end"),
    ("loop that nothing interrupts", _inside("import signal", "signal.setitimer(signal.ITIMER_REAL, 0)",
     "while True:", "    try:", "        while True: pass", "    except BaseException: pass"), "stopped", "did not end"),
    ("waits for input", "input()", "no answer", "EOFError"),
    # takes too much
    ("forks", "import os\nwhile True: os.fork()", "stopped", "it started more than"),
    ("forks in the answer", _inside("import os", "while True: os.fork()"), "stopped", "it started more than"),
    ("starts threads", "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()", "", ""),
    ("takes memory at once", "x = bytearray(10**12)", "no answer", "MemoryError"),
    ("takes memory bit by bit", "x = []\nwhile True: x.append(bytes(10**7) + b'x')", "no answer", "MemoryError"),
    ("takes memory in torch", "import torch\nx = torch.ones(10**12)", "no answer", "RuntimeError"),
    ("shares memory", "import mmap\nx = mmap.mmap(-1, 10**12)", "no answer", "Cannot allocate memory"),
    ("prints gigabytes", "while True: print('x' * 10**6, flush=True)", "no answer", "File too large"),
    ("prints gigabytes in the answer", _inside("while True: print('x' * 10**6)"), "stopped", "did not end"),
    ("writes a huge file", "f = open('big', 'wb')\nf.seek(10**10)\nf.write(b'x')\nf.flush()", "no answer", "File too large"),
    ("writes many files", "import itertools\nfor i in itertools.count(): open(f'f{i}', 'wb').write(bytes(10**7))", "stopped", "wrote more than"),
    ("makes a deep folder", "import os\nfor _ in range(10**5):\n    os.mkdir('d')\n    os.chdir('d')", "stopped", "stopped"),
    # hurts others
    ("kills its parent", "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)" + RIGHT, "solved", ""),
    ("kills everybody", "import os\n" + _TRIES.format("os.kill(-1, 9)") + RIGHT, "solved", ""),
    ("kills one by one", "import os\nfor pid in range(2, 40000):\n    try: os.kill(pid, 9)\n    except OSError: pass\n" + RIGHT, "solved", ""),
    ("deletes", "import shutil, os\nshutil.rmtree(os.path.dirname({outside!r}), ignore_errors=True)" + RIGHT, "solved", ""),
    ("writes outside", _TRIES.format("open({outside!r}, 'w').write('A+')") + RIGHT, "solved", ""),
    ("appends through a link", "import os\n" + _TRIES.format("os.symlink({outside!r}, 'mine'); open('mine', 'a').write('A+')") + RIGHT, "solved", ""),
    ("links hard", "import os\n" + _TRIES.format("os.link({outside!r}, 'mine'); open('mine', 'w')") + RIGHT, "solved", ""),
    ("renames", "import os\n" + _TRIES.format("os.rename({outside!r}, {outside!r} + '.old')") + RIGHT, "solved", ""),
    ("takes away rights", "import os\n" + _TRIES.format("os.chmod({outside!r}, 0)") + RIGHT, "solved", ""),
    ("changes the time", "import os\n" + _TRIES.format("os.utime({outside!r}, (0, 0))") + RIGHT, "solved", ""),
    ("mounts", "import ctypes\nctypes.CDLL(None).mount(None, b'/', None, 32, None)\n" + _TRIES.format("open({outside!r}, 'w')") + RIGHT, "solved", ""),
    ("reads another answer", "exec(open({other!r}).read())", "no answer", "Permission denied"),
    ("calls home", "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)\n", "no answer", ""),
    ("leaves a process", "import subprocess\nsubprocess.Popen(['sleep', '98765'], start_new_session=True)" + RIGHT, "solved", ""),
    # ends early, with a result of its own
    ("exits", "import sys\nsys.exit(0)", "no answer", "SystemExit"),
    ("leaves", _inside("import os", "os._exit(0)"), "stopped", "ended before the check did"),
    ("leaves with a result", "import os\n" + _ALL_HANDLES + "\nos._exit(0)", "stopped", "ended before the check did"),
    ("floods every handle", "import os\nos.set_blocking(1, False)\nfor fd in range(3, 256):\n    try: os.write(fd, b'x' * 10**6)\n    except OSError: pass", "stopped", "own channel"),
    ("raises an interrupt", _inside("raise KeyboardInterrupt"), "not yet", "KeyboardInterrupt"),
    ("raises what is no Exception", _inside("raise type('Odd', (BaseException,), {{}})('!')"), "not yet", "Odd"),
    ("crashes", _inside("import ctypes", "ctypes.string_at(0)"), "stopped", "SIGSEGV"),
    ("recurses", _inside("import sys", "sys.setrecursionlimit(10**9)", "return fill(target, seq_len, gpus, fits)"), "stopped", ""),
    ("answers twice", "import os\ntimes = []" + RIGHT.replace("    share", "    times or times.append(os.fork())\n    share", 1), "solved", ""),
    # changes the checks
    ("redefines check", "def check(*arguments): return True" + WRONG, "not yet", ""),
    ("replaces check", "import labutils.teach.check as c\nc.check = lambda *a: c.Report(c.exercises.find(a[0]), (c.Verdict('all', 'passed'),))" + WRONG, "not yet", "changed labutils.teach.check.check"),
    ("replaces a part of check", "import labutils.teach.check as c\nc._verdict = lambda *a: c.Verdict('all', 'passed')" + WRONG, "not yet", "changed labutils.teach.check._verdict"),
    ("gives check other code", "import labutils.teach.check as c\nc._verdicts.__code__ = (lambda exercise, attempt: (Verdict('all', 'passed'),)).__code__" + WRONG, "not yet", "the code of _verdicts"),
    ("empties the exercise", "from labutils.teach import exercises\nobject.__setattr__(exercises.find('accumulation/configure'), 'properties', ())" + WRONG, "not yet", "the exercise accumulation/configure"),
    ("weakens a property", "from labutils.teach import exercises\nfor p in exercises.find('accumulation/configure').properties: object.__setattr__(p, 'test', lambda attempt: '')" + WRONG, "not yet", "the property"),
    ("hides a builtin", "from labutils.teach.exercises import accumulation as e\ne.map = lambda *a: (1, 1)" + WRONG, "not yet", "changed labutils.teach.exercises.accumulation.map"),
    ("makes all equal", "import torch, math\ntorch.allclose = lambda *a, **k: True\nmath.isclose = torch.allclose" + WRONG, "not yet", "changed torch.allclose"),
    ("puts another module", "import sys, types\nsys.modules['labutils.teach.check'] = types.ModuleType('check')" + WRONG, "not yet", "changed labutils.teach.check"),
    ("changes the check when called", _inside("import labutils.teach.check as c", "c._verdict = lambda *a: c.Verdict('all', 'passed')"), "void", "changed labutils.teach.check._verdict"),
    ("changes the grader", "import labutils.teach.grade.judge as j\nj._outcome = lambda *a: dict(status='solved', said='', passed=1, of=1, remarks=[])\nj.Seal.broken = lambda self: []" + WRONG, "not yet", ""),
    ("changes the main program", "import __main__\n__main__.main = __main__.grade = None" + RIGHT, "solved", ""),
    ("traces", "import sys\nsys.settrace(lambda *a: None)" + RIGHT, "solved", "uses sys"),
    ("hands in the solution", "from labutils.teach import exercises\nfill = exercises.find('accumulation/configure').reference", "solved", "is the library's own"),
    # is broken
    ("nothing", "", "no answer", "fill"),
    ("no Python", "def fill(:", "no answer", "no Python"),
    ("brackets", "(" * 10000, "no answer", "no Python"),
    ("a null byte", "fill = '\\0" + "\0'", "no answer", "no Python"),
    ("magic", "%timeit 1\n!ls\nfill?" + RIGHT, "solved", ""),
    ("made by exec", "exec('part = lambda t, s, g: t // s // g')" + RIGHT.replace("target // seq_len // gpus", "part(target, seq_len, gpus)"), "solved", ""),
]  # fmt: skip

# What must be out of reach for a submission to be run at all: elsewhere it would do its harm.
HARM = dict.fromkeys(("kills its parent", "kills everybody", "kills one by one"), "signals")
HARM |= dict.fromkeys(
    (name for name, code, *_ in CODE if "{outside!r}" in code or "{other!r}" in code), "files"
) | {"calls home": "network", "leaves a process": "orphans"}
