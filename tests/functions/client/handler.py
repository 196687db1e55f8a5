"""Uses a guest's network with unmodified clients: curl, urllib with ssl, boto3, and sockets."""

import errno
import hashlib
import multiprocessing
import os
import resource
import select
import socket
import ssl
import subprocess
import urllib.request

CA = os.path.join(os.path.dirname(__file__), "ca.pem")


def handler(event, context):
    return globals()[event["do"]](**{name: event[name] for name in event if name != "do"})


def outcome(process):
    out, error = process.communicate()
    return {"code": process.returncode, "out": out.decode(), "error": error.decode()}


def start(script):
    """Starts a shell with the certificate authority's file as $CA."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(["sh", "-c", script], env={**os.environ, "CA": CA}, **pipes)


def run(script):
    return outcome(start(script))


started = []


def begin(script):
    """Starts a shell that runs on after this event."""
    started.append(start(script))


def finish():
    """Waits for the shell that runs."""
    return outcome(started.pop())


def fetch(url, put=None, limit=60):
    """The digest of what urllib gets, or the text that it gets for `put` bytes."""
    context = ssl.create_default_context(cafile=CA)
    body = None if put is None else os.urandom(put)
    request = urllib.request.Request(url, body, method="GET" if put is None else "PUT")
    try:
        with urllib.request.urlopen(request, timeout=limit, context=context) as answer:
            digest, length = hashlib.sha256(), 0
            while part := answer.read(1 << 16):
                digest.update(part)
                length += len(part)
                last = part
    except (OSError, ssl.SSLError) as error:
        return {"error": type(getattr(error, "reason", error)).__name__}
    if put is None:
        return {"length": length, "digest": digest.hexdigest()}
    return {"length": put, "same": last.decode() == hashlib.sha256(body).hexdigest()}


def resolve(name):
    """The addresses of a name, or the error's name."""
    try:
        found = socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        names = {value: key for key, value in vars(socket).items() if key.startswith("EAI_")}
        return names[error.errno]
    return sorted(address[0] for *_, address in found)


def exchange(address, port, send, then, megabytes):
    """Sends text and, when the other side has ended (`after`) or before (`before`), random bytes,
    and ends. The digest of the bytes, and what came back."""
    body = os.urandom(megabytes << 20)
    with socket.create_connection((address, port), timeout=60) as connection:
        read = lambda: b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()
        connection.sendall(send.encode())
        back = read() if then == "after" else ""
        connection.sendall(body)
        connection.shutdown(socket.SHUT_WR)
        back += read()
    return {"digest": hashlib.sha256(body).hexdigest(), "back": back}


held = []
processes = multiprocessing.get_context("fork")
workers = []


def hold(address, port, send):
    """Opens a connection that stays open, and sends text. It reads nothing."""
    connection = socket.create_connection((address, port), timeout=60)
    connection.sendall(send.encode())
    held.append(connection)


def flows(address, port, count):
    """Opens connections, all at the same time, that stay open. The number for each result."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    # Each process has files besides.
    shares = [min(most - 100, count - start) for start in range(0, count, most - 100)]
    for _ in shares:
        own, theirs = processes.Pipe()
        processes.Process(target=work, args=(theirs,), daemon=True).start()
        workers.append(own)
    return together("connect", [(address, port, share) for share in shares])


def use():
    """Sends a byte over each connection that is open, then waits for it to come back. The number
    for each result."""
    return together("echo", [()] * len(workers))


def work(pipe):
    """A process with connections of its own: one may not have enough files for all."""
    while True:
        step, arguments = pipe.recv()
        pipe.send(globals()[step](*arguments))


def together(step, arguments):
    """A step in every worker, and the sums of their results."""
    for worker, own in zip(workers, arguments):
        worker.send((step, own))
    sums = {}
    for worker in workers:
        for result, number in worker.recv().items():
            sums[result] = sums.get(result, 0) + number
    return sums


def connect(address, port, count):
    """A worker's step of flows."""
    poll, pending, results = select.epoll(), {}, {}
    for _ in range(count):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((address, port))
        pending[connection.fileno()] = connection
        poll.register(connection, select.EPOLLOUT)
    while pending:
        events = poll.poll(60)
        if not events:
            results["pending"] = len(pending)
            break
        for descriptor, _ in events:
            connection = pending.pop(descriptor)
            poll.unregister(descriptor)
            failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            result = errno.errorcode[failed] if failed else "open"
            results[result] = results.get(result, 0) + 1
            if not failed:
                connection.setblocking(True)
                connection.settimeout(60)
                held.append(connection)
    return results


def echo():
    """A worker's step of use."""
    results = {}

    def each(step):
        for number, connection in enumerate(held):
            if connection is None:
                continue
            try:
                result = step(connection)
            except OSError as error:
                result = type(error).__name__
            if result:
                results[result] = results.get(result, 0) + 1
                if result != "open":
                    held[number] = None

    each(lambda connection: connection.sendall(b"x"))
    each(lambda connection: "open" if connection.recv(1) == b"x" else "ended")
    return results


def drop():
    """Closes the connections."""
    for connection in held:
        if connection is not None:
            connection.close()
    held.clear()


def store(endpoint, mebibytes):
    """Puts an object and gets it back, with checksums, in one part and in several."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 0}, read_timeout=300)
    keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret-of-the-key"}
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", verify=CA, config=config, **keys)
    client.create_bucket(Bucket="bucket")
    small = os.urandom(100_000)
    put = client.put_object(Bucket="bucket", Key="small", Body=small, ChecksumAlgorithm="SHA256")
    got = client.get_object(Bucket="bucket", Key="small", ChecksumMode="ENABLED")
    seen = {"small": got["Body"].read() == small, "checksum": put["ChecksumSHA256"] == got["ChecksumSHA256"]}

    digest = hashlib.sha256()
    with open("/tmp/large", "wb") as file:
        for _ in range(mebibytes):
            block = os.urandom(1 << 20)
            digest.update(block)
            file.write(block)
    parts = TransferConfig(multipart_threshold=8 << 20, multipart_chunksize=8 << 20, max_concurrency=4)
    client.upload_file("/tmp/large", "bucket", "large", Config=parts)
    os.remove("/tmp/large")
    seen["parts"] = int(client.head_object(Bucket="bucket", Key="large")["ETag"].strip('"').split("-")[1])
    client.download_file("bucket", "large", "/tmp/back", Config=parts)
    with open("/tmp/back", "rb") as file:
        seen["large"] = hashlib.file_digest(file, "sha256").hexdigest() == digest.hexdigest()
    os.remove("/tmp/back")
    seen["digest"] = digest.hexdigest()
    return seen
