"""Reports on its machine and changes it."""

import ctypes
import errno
import hashlib
import os
import socket
import struct


def handler(event, context):
    return globals()[event["do"]](**{name: event[name] for name in event if name != "do"})


def processors():
    """The number of processors that the kernel shows, and those that a program can run on."""
    with open("/proc/cpuinfo") as info:
        shown = sum(line.startswith("processor") for line in info)
    ran = []
    for processor in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {processor})
        with open("/proc/self/stat") as stat:
            ran.append(int(stat.read().rsplit(") ", 1)[1].split()[36]))
    os.sched_setaffinity(0, range(shown))
    return {"shown": shown, "ran": sorted(ran)}


def sizes():
    """The sizes of /proc/meminfo, bytes."""
    with open("/proc/meminfo") as info:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in info}


def memory():
    """Bytes of memory that the kernel has."""
    return sizes()["MemTotal"]


held = []


def fill(mebibytes):
    """Fills memory with bytes that differ from page to page, and keeps it."""
    for number in range(len(held), len(held) + mebibytes):
        held.append(hashlib.shake_128(str(number).encode()).digest(4096) * 256)
    return len(held)


def exhaust(mebibytes):
    """Allocates memory in one step, so that without enough memory it waits for nothing else."""
    return len(b"\xff" * (mebibytes << 20))


def shorten():
    """Takes all free memory and a part of what files have in memory, for a moment."""
    memory = sizes()
    return exhaust(memory["MemFree"] + memory["Active(file)"] // 4 >> 20)


def thrash(seconds):
    """Leaves the machine too little memory for the files that it reads again and again."""
    import glob
    import time

    memory = sizes()
    kept = b"\xff" * (memory["MemFree"] + memory["Cached"] - (8 << 20))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for path in filter(os.path.isfile, glob.iglob("/usr/lib/**/*.so*", recursive=True)):
            with open(path, "rb") as file:
                while file.read(1 << 16):
                    pass
    return len(kept)


def scatter():
    """Frees every second page of a block, and has the kernel fill some of them with what it cannot
    move: 20 MiB stay free, in pieces. Then the kernel wants a larger piece."""
    import mmap

    with mmap.mmap(-1, sizes()["MemFree"] - (24 << 20), mmap.MAP_PRIVATE) as block:
        block.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, len(block), mmap.PAGESIZE):
            block[page] = 1
        for page in range(0, len(block), 2 * mmap.PAGESIZE):
            block.madvise(mmap.MADV_DONTNEED, page, mmap.PAGESIZE)
        ends = [end for _ in range(200) for end in os.pipe()]
        for into in ends[1::2]:
            os.write(into, bytes(1 << 16))
        near, far = socket.socketpair()
        near.sendall(bytes(1 << 16))
    for end in ends:
        os.close(end)
    near.close()
    far.close()


def check():
    """The numbers of the held mebibytes that are not what `fill` made them."""
    return [
        number
        for number, block in enumerate(held)
        if block != hashlib.shake_128(str(number).encode()).digest(4096) * 256
    ]


def write(path, text):
    with open(path, "w") as file:
        file.write(text)
        os.fsync(file.fileno())
    return os.stat(path).st_size


def append(path, text):
    with open(path, "a") as file:
        file.write(text)
        os.fsync(file.fileno())
    return read(path)


def read(path):
    with open(path) as file:
        return file.read()


def read_again(path):
    """Reads a file from its disk, not from the kernel's page cache."""
    with open(path) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def connect(port, count, length):
    """Opens connections to a port of the host, all at the same time, and sends bytes over each.
    Returns how many got the complement of what they sent, or why one was refused."""
    SO_VM_SOCKETS_CONNECT_TIMEOUT = 6
    limit = struct.pack("qq", 60, 0)
    sent = [hashlib.shake_128(str(number).encode()).digest(length) for number in range(count)]
    connections = [socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) for _ in sent]
    try:
        for connection in connections:
            # Python's own function sets only numbers here.
            option = (socket.AF_VSOCK, SO_VM_SOCKETS_CONNECT_TIMEOUT, limit, len(limit))
            assert ctypes.CDLL(None).setsockopt(connection.fileno(), *option) == 0
            connection.connect((socket.VMADDR_CID_HOST, port))
        for connection, data in zip(connections, sent):
            connection.sendall(data)
        got = [receive(connection, length) for connection in connections]
    except OSError as error:
        return {"refused": errno.errorcode[error.errno]}
    finally:
        for connection in connections:
            connection.close()
    complement = bytes(range(255, -1, -1))
    return {"right": sum(data.translate(complement) == back for data, back in zip(sent, got))}


def receive(connection, length):
    got = b""
    while len(got) < length and (more := connection.recv(length - len(got))):
        got += more
    return got


def say(text):
    print(text)


def rename(name):
    """Sets the name that the kernel prints in reports on this process."""
    PR_SET_NAME = 15
    ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.create_string_buffer(name.encode("latin-1")), 0, 0, 0)


def echo(address, port, mebibytes):
    """Sends bytes to a server that sends them back, and compares."""
    import socket
    import threading

    sent = hashlib.shake_128(b"echo").digest(1 << 20) * mebibytes
    with socket.create_connection((address, port), timeout=60) as connection:
        sender = threading.Thread(target=lambda: (connection.sendall(sent), connection.shutdown(socket.SHUT_WR)))
        sender.start()
        received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        sender.join()
    return received == sent


kept = []


def dial(address, port):
    """Opens a connection that stays open."""
    import socket

    kept.append(socket.create_connection((address, port), timeout=60))


def use():
    """Sends a byte over each connection that is open, and waits for it to come back."""

    def one(connection):
        try:
            connection.sendall(b"x")
            return "open" if connection.recv(1) == b"x" else "ended"
        except OSError as error:
            return type(error).__name__

    return [one(connection) for connection in kept]


pooled = []


def fetch(path, method="GET", headers={}, pool=False):
    """The status and the text of an answer of the metadata service, over a new connection or over
    one that stays open."""
    import http.client

    if not (pool and pooled):
        pooled[:] = [http.client.HTTPConnection("169.254.169.254", timeout=60)]
    (connection,) = pooled
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return [response.status, response.read().decode()]
    except OSError as error:
        return type(error).__name__
