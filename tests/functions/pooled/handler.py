"""HTTP clients with pooled connections, beside other connections that stay open."""

import resource
import socket

import boto3
import urllib3
from botocore.config import Config

idle = []
clients = {}


def handler(event, context):
    return globals()[event["do"]](**{name: event[name] for name in event if name != "do"})


def hold(address, port, count):
    """Opens connections that stay open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for _ in range(count):
        idle.append(socket.create_connection((address, port), timeout=60))
    return len(idle)


def post(address, port, bodies):
    """Sends requests with each client, over a pooled connection if it still is one. An error, also
    a time-out, ends this: the clients do not try again."""
    if not clients:
        clients["urllib3"] = urllib3.HTTPConnectionPool(address, port, maxsize=1, timeout=60)
        once = Config(retries={"total_max_attempts": 1}, connect_timeout=60, read_timeout=60)
        clients["boto3"] = boto3.client(
            "lambda",
            region_name="us-east-1",
            endpoint_url=f"http://{address}:{port}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            config=once,
        )
    statuses = []
    for body in bodies:
        statuses.append(clients["urllib3"].request("POST", "/urllib3", body=f"urllib3 {body}", retries=False).status)
        answer = clients["boto3"].invoke(FunctionName="f", Payload=f"boto3 {body}")
        # A connection returns to its pool when the answer is read.
        answer["Payload"].read()
        statuses.append(answer["StatusCode"])
    return statuses


def ends():
    """What each connection that stayed open has come to, without a byte sent."""

    def end(connection):
        connection.setblocking(False)
        try:
            return "ended" if connection.recv(1) == b"" else "data"
        except OSError as error:
            return type(error).__name__

    names = [end(connection) for connection in idle]
    return {name: names.count(name) for name in names}
