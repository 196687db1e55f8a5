"""An HTTPS server for clients in guests. The argument is the folder with its certificate.

It listens on port 443 of all addresses, and prints a line when it does:

    GET /bytes/N           N bytes
    GET /reset             half of its body, then a TCP reset
    PUT, POST /sha256      the digest of the request's body
    PUT, POST /together/N  the same, once N such requests are there
"""

import array
import hashlib
import http.server
import pathlib
import socket
import ssl
import struct
import sys
import threading

certificates = pathlib.Path(sys.argv[1])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
barriers = {}
lock = threading.Lock()
BLOCK = 1 << 16


def blocks(length):
    """Bytes that are different in each place: the number of each word."""
    for start in range(0, length, BLOCK):
        words = array.array("I", range(start // 4, (start + BLOCK) // 4))
        yield words.tobytes()[: length - start]


def barrier(count):
    with lock:
        return barriers.setdefault(count, threading.Barrier(count, timeout=600))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def begin(self, length):
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_GET(self):
        if self.path == "/reset":
            self.begin(2 * BLOCK)
            self.wfile.writelines(blocks(BLOCK))
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Below TLS, which would end the stream in order.
            socket.close(self.connection.detach())
            self.close_connection = True
            return
        length = int(self.path.removeprefix("/bytes/"))
        self.begin(length)
        self.wfile.writelines(blocks(length))

    def do_PUT(self):
        digest, left = hashlib.sha256(), int(self.headers["Content-Length"])
        while left > 0 and (part := self.rfile.read(min(left, BLOCK))):
            digest.update(part)
            left -= len(part)
        if self.path.startswith("/together/"):
            barrier(int(self.path.removeprefix("/together/"))).wait()
        answer = digest.hexdigest().encode()
        self.begin(len(answer))
        self.wfile.write(answer)

    do_POST = do_PUT

    def finish(self):
        # After a reset there is nothing to flush to.
        if self.connection.fileno() >= 0:
            super().finish()

    def log_message(self, format, *arguments):
        pass


class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6
    request_queue_size = 64

    def finish_request(self, request, address):
        # In the connection's own thread: a handshake waits for the client.
        try:
            with context.wrap_socket(request, server_side=True) as connection:
                super().finish_request(connection, address)
        except OSError:
            # The client has given up, or does not trust the certificate.
            pass

    def shutdown_request(self, request):
        self.close_request(request)


server = Server(("::", 443), Handler)
print("ready", flush=True)
server.serve_forever()
