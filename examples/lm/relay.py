"""Relays a local address to a remote one and closes connections one second late.

JAX aborts a process with a C++ stack trace as soon as its connection to the first process closes. Through a relay, JAX
notices one second later, when `lm.peers` has already ended the process with one line.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

_DELAY = 1.0  # seconds
_CONNECT = 10.0  # seconds within which the target must accept
_RETRY = 0.05


def relayed(host: str, port: int) -> str:
    """Starts a relay and returns its address; its threads end with the process."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(server, (host, port)), name="relay", daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"


def _serve(server: socket.socket, target: tuple[str, int]) -> None:
    while True:
        near, _ = server.accept()
        threading.Thread(target=_connect, args=(near, target), name="relay", daemon=True).start()


def _connect(near: socket.socket, target: tuple[str, int]) -> None:
    deadline = time.monotonic() + _CONNECT
    while time.monotonic() < deadline:
        try:
            far = socket.create_connection(target, timeout=_CONNECT)
        except OSError:
            time.sleep(_RETRY)
            continue
        far.settimeout(None)
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        outward = threading.Thread(target=_forward, args=(near, far, 0.0), name="relay", daemon=True)
        outward.start()
        _forward(far, near, _DELAY)
        outward.join()
        far.close()
        break
    near.close()


def _forward(source: socket.socket, sink: socket.socket, delay: float) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(65536):
            sink.sendall(received)
    time.sleep(delay)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
