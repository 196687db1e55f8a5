"""Steps that every clone of a Python process performs. Precedes the agent's own runtime and the
bootstrap of AWS Lambda's runtime.

The agent passes a socket as standard input. A message is a frame (u32 little-endian length, then
JSON): an object with one key. For a freeze the agent sends `collect` and `hold`. A clone then gets
`identify`.
"""

import gc
import os
import socket
import struct
import sys
from functools import partial

DONE = '{"done":null}'


class Channel:
    """Frames over a socket."""

    def __init__(self, socket):
        self.socket = socket

    @classmethod
    def of_agent(cls):
        channel = cls(socket.socket(fileno=os.dup(0)))
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        return channel

    def read(self, count):
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self.socket.recv_into(view)
            if not got:
                os._exit(0)  # the agent has exited
            view = view[got:]
        return data

    def receive(self):
        return self.read(struct.unpack("<I", self.read(4))[0])

    def send(self, text):
        self.socket.sendall(frame(text))


def frame(text):
    data = text.encode("ascii")
    return struct.pack("<I", len(data)) + data


def identify(instance_id, log_stream_name, reseeded):
    """Replaces the identity, and the random state that a clone that was held has not replaced."""
    os.environ["FIRN_INSTANCE_ID"] = instance_id
    os.environ["AWS_LAMBDA_LOG_STREAM_NAME"] = log_stream_name
    reseed(hold.reseeds if reseeded else ())


def reseed(done):
    """Replaces the random state that clones of this process would share, but for the modules that
    have done so. Other modules keep no random state, or get it from the kernel each time."""

    def loaded(name):
        return name not in done and sys.modules.get(name)

    if module := loaded("random"):
        module.seed()
    if module := loaded("tempfile"):
        module._name_sequence = None
    if module := loaded("uuid"):
        # The node and clock sequence of libuuid cannot be reset; those of Python's own code can.
        module._generate_time_safe = None
        module._node = int.from_bytes(os.urandom(6), "big") | 1 << 40
        module._last_timestamp = None
    if module := loaded("ssl"):
        module.RAND_add(os.urandom(64), 64.0)
    if module := loaded("numpy.random"):
        module.seed()


def collect():
    """Minimises the garbage in a snapshot, and excludes existing objects from later collections:
    each write of the collector to them would copy a page in every clone."""
    gc.collect()
    gc.freeze()


def call_in_sequence(calls):
    """`map` calls functions of C one after the other, and between them the interpreter never
    releases its lock. It would at any bytecode, if another thread has requested it."""
    tuple(map(partial.__call__, calls))


def reseeding_calls(library):
    """The parts of `reseed` that generate secrets, as calls of C functions. They keep the lock,
    unlike `os.urandom`: the C library of Debian 12 waits for ever if the lock is released while the
    threads that wait for it are stopped."""
    import ctypes
    from operator import or_

    def number(count):
        # At the call, and not now, `map` makes the number of what `data` contains.
        data = (ctypes.c_char * count)()
        calls.append(partial(library.getrandom, data, count, 0))
        return map(int.from_bytes, [data], ["big"])

    def loaded(name):
        if module := sys.modules.get(name):
            hold.reseeds.add(name)
        return module

    calls = []
    hold.reseeds = set()
    if module := loaded("random"):
        import _random

        # The module's functions belong to its first generator, whatever `_inst` is now.
        bound = [getattr(function, "__self__", None) for function in (module.seed, module.random)]
        generators = {id(generator): generator for generator in [module._inst, *bound]}
        for generator in generators.values():
            if isinstance(generator, _random.Random):
                calls.append(partial(next, map(_random.Random.seed, [generator], number(256))))
                calls.append(partial(setattr, generator, "gauss_next", None))
    if module := loaded("tempfile"):
        calls.append(partial(setattr, module, "_name_sequence", None))
    if module := loaded("uuid"):
        calls.append(partial(setattr, module, "_generate_time_safe", None))
        calls.append(partial(setattr, module, "_last_timestamp", None))
        node = map(or_, number(6), [1 << 40])
        calls.append(partial(next, map(setattr, [module], ["_node"], node)))
    if module := loaded("ssl"):
        entropy = (ctypes.c_char * 64)()
        calls.append(partial(library.getrandom, entropy, len(entropy), 0))
        calls.append(partial(module.RAND_add, entropy, 64.0))
    if module := loaded("numpy.random"):
        import numpy

        if module.get_state()[0] != "MT19937":
            raise RuntimeError("numpy.random has a generator that cannot be reseeded")
        key = numpy.zeros(624, numpy.uint32)
        calls.append(partial(library.getrandom, ctypes.c_void_p(key.ctypes.data), key.nbytes, 0))
        calls.append(partial(module.set_state, ("MT19937", key, 624, 0, 0.0)))
    return calls


def hold(channel):
    """Keeps the interpreter's lock until the agent has resumed the clone's other threads, so that
    no thread that the agent stops owns the lock, and none of them runs before the reseeding."""
    # The module `signal` makes objects of its own from the numbers of this one.
    import _signal as signal
    import ctypes

    # Unlike CDLL, PyDLL calls a function without releasing the lock.
    library = ctypes.PyDLL(None)
    socket = channel.socket.fileno()
    order = (ctypes.c_char * 1)()
    wait = partial(library.read, socket, order, 1)
    answer = partial(library.write, socket, b"\n", 1)
    reply = frame(DONE)
    calls = [partial(library.write, socket, reply, len(reply))]
    for _ in ("rehearsal", "clone"):
        calls += [wait, *reseeding_calls(library), answer]
    # A signal would end a wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # A clone does not free them: that would copy their pages.
    hold.kept = calls + [wait]
    try:
        call_in_sequence(hold.kept)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# Before the first freeze there is nothing to reseed.
hold.reseeds = {"random", "tempfile", "uuid", "ssl", "numpy.random"}


def clone_step(channel, kind, message):
    """Handles a message of the agent about clones, and returns the reply, unless it was sent."""
    if kind == "hold":
        return hold(channel)
    if kind == "identify":
        identify(**message)
    else:
        collect()
    return DONE
