"""An echo service and its client, by four ways of waiting.

usage: echo.py serve PORT WAY | echo.py ask PORT WAY BYTES
WAY is blocking, select, epoll-level or epoll-edge.
"""
import hashlib
import random
import select
import socket
import sys
import threading


class Waiter:
    def __init__(self, sock, way):
        self.sock, self.way = sock, way
        sock.setblocking(way == "blocking")
        sock.settimeout(60 if way == "blocking" else 0)
        if way.startswith("epoll"):
            edge = select.EPOLLET if way == "epoll-edge" else 0
            self.epolls = {}
            for name, events in ("r", select.EPOLLIN | select.EPOLLRDHUP), ("w", select.EPOLLOUT):
                self.epolls[name] = select.epoll()
                self.epolls[name].register(sock.fileno(), events | edge)

    def wait(self, what):
        if self.way == "select":
            r, w, _ = select.select([self.sock] if what == "r" else [], [self.sock] if what == "w" else [], [], 30)
            ready = r or w
        else:
            ready = self.epolls[what].poll(30)
        if not ready:
            raise TimeoutError("nothing for 30 s")

    def recv(self, n):
        while True:
            try:
                return self.sock.recv(n)
            except BlockingIOError:
                self.wait("r")

    def sendall(self, data):
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view):]
            except BlockingIOError:
                self.wait("w")


def handle(sock, way):
    with sock:
        w = Waiter(sock, way)
        while data := w.recv(65536):
            w.sendall(data)
        sock.shutdown(socket.SHUT_WR)


def serve(port, way):
    with socket.create_server(("127.0.0.1", port)) as ln:
        while True:
            sock, _ = ln.accept()
            threading.Thread(target=handle, args=(sock, way), daemon=True).start()


def ask(port, way, total):
    rng = random.Random(1)
    data = rng.randbytes(total)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        w = Waiter(sock, way)
        # In messages that are answered one by one, and at last in one piece.
        got, off = hashlib.sha256(), 0
        for _ in range(200):
            n = rng.randrange(1, 5000)
            w.sendall(data[off:off + n])
            want = len(data[off:off + n])
            off += want
            while want:
                part = w.recv(want)
                if not part:
                    raise EOFError("the service has finished early")
                got.update(part)
                want -= len(part)
        duplex = Waiter(sock.dup(), way)
        sender = threading.Thread(target=lambda: (duplex.sendall(data[off:]), sock.shutdown(socket.SHUT_WR)))
        sender.start()
        while part := w.recv(65536):
            got.update(part)
        sender.join()
        if got.digest() != hashlib.sha256(data).digest():
            raise ValueError("the echo differs")


if sys.argv[1] == "serve":
    serve(int(sys.argv[2]), sys.argv[3])
else:
    ask(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
