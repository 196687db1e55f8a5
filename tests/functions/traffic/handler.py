"""Traffic in both directions, over TCP and UDP, that never ends."""

import socket
import threading
import time

counts = {"client": 0, "server": 0, "datagrams": 0}


def handler(event, context):
    return globals()[event["do"]](**{name: event[name] for name in event if name != "do"})


def start(address, tcp, udp, server):
    """Starts a client of an echo server, a server on port `server`, and datagrams.

    The server listens when this returns."""
    threading.Thread(target=client, args=(address, tcp), daemon=True).start()
    listener = socket.create_server(("0.0.0.0", server))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    threading.Thread(target=datagrams, args=(address, udp), daemon=True).start()


def client(address, port):
    """Exchanges bytes over one connection until it breaks, then over another."""
    while True:
        try:
            with socket.create_connection((address, port), timeout=60) as connection:
                while exchange(connection):
                    counts["client"] += 1
        except OSError:
            pass


def exchange(connection):
    connection.sendall(b"x" * 20000)
    left = 20000
    while left and (got := len(connection.recv(left))):
        left -= got
    return not left


def serve(listener):
    while True:
        threading.Thread(target=echo, args=(listener.accept()[0],), daemon=True).start()


def echo(connection):
    try:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)
                counts["server"] += 1
    except OSError:
        pass


def datagrams(address, port):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.connect((address, port))
        endpoint.settimeout(0.2)
        while True:
            try:
                endpoint.send(b"question")
                counts["datagrams"] += len(endpoint.recv(100)) == 8
            except OSError:
                time.sleep(0.01)


def check(address, tcp, udp):
    """A new connection and a datagram, each tried once, and then progress of all that goes on."""
    with socket.create_connection((address, tcp), timeout=60) as connection:
        connected = exchange(connection)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as endpoint:
        endpoint.connect((address, udp))
        endpoint.settimeout(60)
        endpoint.send(b"question")
        answered = endpoint.recv(100) == b"question"
    before = dict(counts)
    deadline = time.monotonic() + 60
    while any(counts[name] == before[name] for name in counts) and time.monotonic() < deadline:
        time.sleep(0.001)
    moved = [name for name in counts if counts[name] > before[name]]
    return {"connected": connected, "answered": answered, "moved": moved}
