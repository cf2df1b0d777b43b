"""Ranks that pause at random where they meet: it shows what else depends on their order, or on a clock.

    PYTHONPATH=tests/shaken SHAKEN=0.1 python -m pytest tests/test_world.py notebooks/08_data_parallel.ipynb

Python imports this file at the start of every process that has its folder on the path: the tests', a
rank's, a notebook's kernel. It is not part of `make test`, and takes several times as long. SHAKEN is
the share of calls before and after which a thread pauses, a few milliseconds mostly and seldom a
tenth of a second, as on a busy machine. Draws are other ones in each process and each run.
"""

import functools
import os
import random
import sys
import threading
import time

SHARE = float(os.environ.get("SHAKEN", 0))
MEET = {  # classes of labutils, and what of theirs is called where threads meet
    "world.threads": {"Rendezvous": "post until_done begin finish end"},
    "world.sockets": {
        "SocketEndpoint": "post until_done begin finish leave _fill _empty _flush _receive _hand_over",
        "PeerLink": "put",
    },
    "world.distributed": {"DistributedEndpoint": "post until_done"},
    "world.messages": {"Work": "wait"},
    "world.rank": {"Rank": "comm _finish"},
    "pipeline.execute": {"_Execution": "_run _send _isend _recv"},
}
_draw, _sleep, _run = random.Random(), time.sleep, threading.Thread.run


def pause():
    drawn = _draw.random()
    if drawn < SHARE:
        _sleep(_draw.uniform(0, 0.1 if drawn < SHARE / 50 else 0.005))


def pausing(call):
    @functools.wraps(call)
    def paused(*args, **kwargs):
        pause()
        result = call(*args, **kwargs)
        pause()
        return result

    return paused


def shake():
    """Let what has been imported pause, once."""
    for module, classes in MEET.items():
        for name, calls in classes.items():
            known = vars(sys.modules.get(f"labutils.{module}", object)).get(name, object)
            for call in {*calls.split()} & vars(known).keys():  # a test may have put another there
                if not hasattr(vars(known)[call], "__wrapped__"):
                    setattr(known, call, pausing(vars(known)[call]))


def run(thread):  # ranks, and what works beside them, are threads that start after the imports
    shake()
    pause()
    _run(thread)


if SHARE:
    threading.Thread.run = run
    sys.setswitchinterval(_draw.choice([1e-5, 1e-4, 5e-3, 2e-2]))
