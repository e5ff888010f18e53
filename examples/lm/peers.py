"""Connects the processes of a run before JAX starts, and ends each with one line when another one is lost.

JAX waits five minutes for a missing process and aborts with a C++ stack trace when it loses one. Therefore the
processes first connect to process 0 (on the port that JAX uses afterwards) and send their index. When all have joined,
they start JAX and keep these connections, which carry lines of text:

    hello ID COUNT      to process 0: index of the sender and number of processes
    came COUNT          from process 0: number of processes that have joined
    go, error TEXT      from process 0: all have joined, or why the run cannot start
    beat                both ways, every few seconds: heartbeat
    bye                 this process is done; its connection will close
    failed ID           this process exits with an error that it reports itself
    lost ID TEXT        from process 0: another process was killed or does not respond
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import selectors
import socket
import sys
import threading
import time
from types import TracebackType
from typing import NamedTuple, NoReturn, Self

from lm.flags import RunError, UserError

_GREETING = "ringjax-lm hello"
_BEAT, _SILENCE = 5.0, 40.0  # seconds between heartbeats, and without one until a process counts as lost
_RETRY = 0.2  # seconds between connection attempts
_SLACK = 2.0  # seconds after the timeout for process 0 to report which processes are missing
_OWN_ERROR = 2.0  # seconds for a process to report its own error after another has failed
_LAST = 10.0  # seconds until a failed process is ended, whatever its threads do
_MAX_LINE = 1024


class Address(NamedTuple):
    """Address of the first process.

    Example:
        >>> Address.parse("[::1]:1234").bind
        '[::1]:1234'
        >>> Address.parse("localhost:1234").bind
        '127.0.0.1:1234'
    """

    text: str
    host: str
    port: int
    option: str = "--coordinator"  # names the source of the address in messages

    @classmethod
    def parse(cls, text: str, option: str = "--coordinator") -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"{option} must be HOST:PORT with a port from 1 to 65535, got {text!r}")
        return cls(text, host.strip("[]"), int(port), option)

    def __str__(self) -> str:
        return f"{self.option} {self.text}"

    @property
    def bind(self) -> str | None:
        """Address to listen on: a loopback address itself, or None for all interfaces.

        Names are not resolved: on many hosts, their own name resolves to a loopback address.
        """
        host = "127.0.0.1" if self.host == "localhost" else self.host
        try:
            is_loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            return None
        if not is_loopback:
            return None
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def listen(self) -> socket.socket:
        """Returns a listening socket; raises `UserError` if the port is in use."""
        try:
            if self.bind:
                host = self.bind.rpartition(":")[0].strip("[]")
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, self.port), family=family)
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", self.port))
        except OSError as error:
            raise UserError(f"{self} cannot be bound: {_reason(error)}") from error


class Connection:
    """Sends and receives lines of text on a socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._partial = connected, b""
        connected.settimeout(_BEAT)
        self.last_seen = time.monotonic()
        self.rank = -1  # not known yet
        self.has_left = False
        self.pending: list[str] = []  # lines received together with `go`

    def receive(self) -> list[str] | None:
        """Returns the lines received so far; None if the socket is closed or does not send lines."""
        try:
            received = self.socket.recv(4096)
        except OSError:
            return None
        *lines, self._partial = (self._partial + received).split(b"\n")
        if not received or len(self._partial) > _MAX_LINE:
            return None
        self.last_seen = time.monotonic()
        return [line.decode("ascii", "replace") for line in lines]

    def send(self, line: str) -> None:
        """Sends a line; a closed connection is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self.socket.sendall(line.encode("ascii", "replace") + b"\n")


class Peers:
    """Monitors the other processes of a run: a context manager around the run, after `rendezvous`.

    Args:
        address: Address of the first process.
        count: Number of processes.
        rank: Index of this process.
    """

    def __init__(self, address: Address, count: int, rank: int) -> None:
        self.address, self.count, self.rank = address, count, rank
        self.connections: list[Connection] = []
        self._ends: tuple[float, str, int] | None = None  # deadline of this process, its last message and its exit code

    def rendezvous(self, timeout: float) -> None:
        """Waits until all processes have joined.

        Raises:
            UserError: If the port is in use, not all processes join within `timeout` seconds, two have the same index,
                or they differ in their number of processes.
        """
        deadline = time.monotonic() + timeout
        if self.rank == 0:
            with self.address.listen() as server:
                self.connections = _Rendezvous(self, server, timeout).gather(deadline)
            for connection in self.connections:
                connection.send("go")
        else:
            self.connections = [self._join(deadline, timeout)]

    def came(self, number: int, timeout: float, missing: str = "") -> str:
        """Returns the error message for missing processes."""
        return (
            f"{self.address}: {number} of {self.count} processes joined within {timeout:g} s (--start-timeout){missing}"
        )

    def _join(self, deadline: float, timeout: float) -> Connection:
        """Returns a connection to the first process once all processes have joined."""
        came, reason = 0, "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                joined = socket.create_connection((self.address.host, self.address.port), timeout=left)
            except OSError as error:
                reason = _reason(error)
                time.sleep(_RETRY)
                continue
            with contextlib.ExitStack() as stack:
                stack.enter_context(joined)
                if joined.getsockname() == joined.getpeername():  # a socket may connect to itself if nobody listens
                    continue
                connection = Connection(joined)
                came, reason = self._ask(connection, deadline + _SLACK), "connected, but no answer"
                if came == self.count:
                    stack.pop_all()
                    return connection
            time.sleep(_RETRY)
        if came:
            raise UserError(self.came(came, timeout))
        raise UserError(
            f"{self.address}: process {self.rank} could not reach process 0 of {self.count} "
            f"within {timeout:g} s (--start-timeout): {reason}"
        )

    def _ask(self, connection: Connection, deadline: float) -> int:
        """Returns how many processes had joined when all had, the time was up or the connection closed."""
        connection.send(f"{_GREETING} {self.rank} {self.count}")
        came = 0
        while (left := deadline - time.monotonic()) > 0:
            connection.socket.settimeout(left)
            lines = connection.receive()
            if lines is None:
                break
            while lines:
                kind, _, text = lines.pop(0).partition(" ")
                if kind == "go":
                    connection.pending = lines
                    return self.count
                if kind == "error":
                    raise UserError("".join(x for x in text if x.isprintable()))
                if kind != "came" or not text.isdecimal():
                    raise UserError(f"{self.address}: another program uses this address")
                came = min(int(text), self.count - 1)  # only `go` means all of them
        return came

    def __enter__(self) -> Self:
        """Starts to monitor the other processes."""
        for connection in self.connections:
            connection.socket.settimeout(_BEAT)
            connection.last_seen = time.monotonic()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Announces how this process ends; the monitoring thread handles errors that a lost process caused."""
        if error is None:
            self._broadcast("bye")
            return
        if not isinstance(error, (UserError, RunError)):
            time.sleep(_OWN_ERROR + 1)  # if another process is lost, the monitoring thread ends this one with a message
        code = 2 if isinstance(error, UserError) else 1
        self._broadcast(f"failed {self.rank}")
        self._ends = (time.monotonic() + _LAST, "", code)
        atexit.register(self._leave, code)  # runs before the exit handler of JAX, which would wait for the others

    def _leave(self, code: int) -> NoReturn:
        """Ends this process at once; process 0 ends last, because JAX aborts the others when it disappears."""
        deadline = time.monotonic() + _OWN_ERROR + 1
        while self.rank == 0 and self.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _watch(self) -> None:
        """Ends this process when another one is lost; runs in a thread."""
        selector, beaten = selectors.DefaultSelector(), time.monotonic()
        for connection in self.connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            for line in connection.pending:
                self._handle(connection, line)
        while True:
            for key, _ in selector.select(0.5):
                lines = key.data.receive()
                for line in lines or ():
                    self._handle(key.data, line)
                if lines is None:
                    selector.unregister(key.fileobj)
                    self.connections.remove(key.data)
                    if not key.data.has_left:
                        self._end(self._from(key.data), "was killed or its host is down")
            now = time.monotonic()
            if now - beaten >= _BEAT:
                beaten = now
                self._broadcast("beat")
                silent = (x for x in self.connections if now - x.last_seen > _SILENCE)
                for connection in silent:
                    self._end(self._from(connection), f"has not responded for {_SILENCE:g} s")
            if self._ends and now > self._ends[0]:
                _exit(*self._ends[1:])

    def _handle(self, connection: Connection, line: str) -> None:
        kind, _, text = line.partition(" ")
        if kind == "bye":
            connection.has_left = True
        elif kind == "lost":
            rank, _, how = text.partition(" ")
            self._end(int(rank), how)
        elif kind == "failed":
            connection.has_left = True
            if self.rank == 0:
                self._broadcast(line)
            if not self._ends:
                line = f"process {text} of {self.count} failed (see its message); exiting"
                self._ends = (time.monotonic() + _OWN_ERROR, line, 1)

    def _from(self, connection: Connection) -> int:
        return connection.rank if self.rank == 0 else 0

    def _broadcast(self, line: str) -> None:
        for connection in list(self.connections):
            connection.send(line)

    def _end(self, rank: int, how: str) -> None:
        """Ends this process, unless it is ending already; process 0 also informs the others."""
        if self._ends:
            return
        if self.rank == 0:
            self._broadcast(f"lost {rank} {how}")
        _exit(f"process {rank} of {self.count} {how}; exiting (continue with --resume)", 1)


def _reason(error: OSError) -> str:
    is_of_system = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return (os.strerror(error.errno) if is_of_system else error.strerror or str(error)).lower()


def _exit(line: str, code: int) -> NoReturn:
    if line:
        os.write(2, f"train_lm: {line}\n".encode())
    os._exit(code)


class _Rendezvous:
    """Accepts the other processes, in process 0."""

    def __init__(self, peers: Peers, server: socket.socket, timeout: float) -> None:
        self.peers, self.server, self.timeout = peers, server, timeout
        self.strangers: set[Connection] = set()  # connections that have not sent their index yet
        self.joined: dict[int, Connection] = {}
        self.selector = selectors.DefaultSelector()

    def gather(self, deadline: float) -> list[Connection]:
        """Returns the connections to all other processes, ordered by rank."""
        count = self.peers.count
        self.selector.register(self.server, selectors.EVENT_READ)
        with self.selector:
            while len(self.joined) < count - 1:
                left = deadline - time.monotonic()
                if left <= 0:
                    missing = [str(rank) for rank in range(1, count) if rank not in self.joined]
                    shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
                    self._fail(self.peers.came(len(self.joined) + 1, self.timeout, f"; missing: {shown}"))
                for key, _ in self.selector.select(left):
                    if key.fileobj is self.server:
                        self._accept()
                    else:
                        self._read(key.data)
        for stranger in self.strangers:
            stranger.socket.close()
        return [self.joined[rank] for rank in range(1, count)]

    def _accept(self) -> None:
        try:
            connection = Connection(self.server.accept()[0])
        except OSError:  # already closed
            return
        self.strangers.add(connection)
        self.selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _read(self, connection: Connection) -> None:
        lines = connection.receive()
        if lines is None or not all(self._is_welcome(connection, line) for line in lines):
            self.selector.unregister(connection.socket)
            connection.socket.close()
            self.strangers.discard(connection)
            self.joined.pop(connection.rank, None)

    def _is_welcome(self, connection: Connection, line: str) -> bool:
        said = line.removeprefix(_GREETING).split()
        if not line.startswith(_GREETING) or len(said) != 2 or not all(x.isdecimal() for x in said):
            return False
        rank, count = map(int, said)
        start = str(self.peers.address)
        if count != self.peers.count:
            asked = f"process {rank} has --num-processes {count}, process 0 has {self.peers.count}"
            self._fail(f"{start}: {asked}", connection)
        if rank in self.joined or not 0 < rank < count:
            self._fail(f"{start}: two processes have --process-id {rank}", connection)
        self.strangers.discard(connection)
        connection.rank = rank
        self.joined[rank] = connection
        for other in self.joined.values():
            other.send(f"came {len(self.joined) + 1}")
        return True

    def _fail(self, line: str, *others: Connection) -> NoReturn:
        for connection in (*self.joined.values(), *others):
            connection.send(f"error {line}")
            connection.socket.close()
        raise UserError(line)
