"""Draws random values all the time: in a thread, in a child process and in requests. Returns those
that were drawn since the last restore, and only those: values from before are in every clone."""

import collections
import ctypes
import json
import os
import random
import ssl
import struct
import subprocess
import sys
import threading
import time

import numpy
from cryptography.hazmat.primitives.asymmetric import ec, x25519

CHILD = "/tmp/drawn-by-a-child"
IN_MODIFY, IN_CLOSE_WRITE = 2, 8


def restores():
    """The number of interrupts of the generation id. The first comes before anything else runs."""
    with open("/proc/interrupts") as lines:
        return next(line.split()[1] for line in lines if line.rstrip().endswith("ACPI:Ged"))


def draw():
    curve = ec.generate_private_key(ec.SECP256R1()).private_numbers().private_value
    return {
        "random": "%032x" % random.getrandbits(128),
        "numpy": numpy.random.bytes(16).hex(),
        "ssl": ssl.RAND_bytes(16).hex(),
        "urandom": os.urandom(16).hex(),
        "ec": "%x" % curve,
        "x25519": x25519.X25519PrivateKey.generate().private_bytes_raw().hex(),
    }


def draw_forever(keep):
    first = restores()
    while True:
        before = restores()
        values = draw()
        # The value of a draw during a restore may have been computed before it.
        if first != before == restores():
            keep(values)


def watch(path):
    """An inotify descriptor for the events of a write to a file."""
    library = ctypes.CDLL(None)
    descriptor = library.inotify_init1(os.O_NONBLOCK)
    added = library.inotify_add_watch(descriptor, path.encode(), IN_MODIFY | IN_CLOSE_WRITE)
    assert descriptor >= 0 and added >= 0
    return descriptor


def read_events(descriptor):
    try:
        data = os.read(descriptor, 4096)
    except BlockingIOError:
        return []
    return [mask for _, mask, _, _ in struct.iter_unpack("iIII", data)]


def child():
    path = os.environ["FIRN_GENERATION_FILE"]
    watched, events, generator = watch(path), [], None
    # The generators of Python and numpy are not in the process that the agent reseeds. They are
    # seeded by the generation, which is in a file: it differs in each clone. A write to it is an
    # event, which is there before the clone's first draw.
    with open(CHILD, "w", 1) as lines:

        def keep(values):
            nonlocal generator
            if new := read_events(watched):
                events.extend(new)
                with open(path) as file:
                    generator = random.Random(int(file.read(), 16))
            values["random"] = "%032x" % generator.getrandbits(128)
            values.pop("numpy")
            print(json.dumps([events, values]), file=lines)

        draw_forever(keep)


def read_child():
    with open(CHILD) as lines:
        return [json.loads(line) for line in lines.read().rpartition("\n")[0].splitlines()]


def handler(event, context):
    first = draw()
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (drawn and read_child()):
        time.sleep(0.05)
    events, of_child = zip(*read_child())
    return {
        "thread": list(drawn),
        "child": of_child,
        "events": events,
        "request": [first, draw()],
    }


if __name__ == "__main__":
    child()
else:
    draw()
    drawn = collections.deque(maxlen=500)
    threading.Thread(target=draw_forever, args=[drawn.append], daemon=True).start()
    subprocess.Popen([sys.executable, __file__])
    while not os.path.exists(CHILD):
        time.sleep(0.01)
