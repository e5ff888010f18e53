"""The processes of a run: they meet before JAX starts, and each one ends with one line when another is lost.

JAX by itself waits five minutes for a process that never comes, and aborts with a C++ stack trace when it loses one. So
processes connect to the first one (on the port that JAX uses afterwards) and say which they are. When all have come,
they start JAX and keep these connections, which carry lines of text:

    hello ID COUNT      to the first process: who comes
    came COUNT          from the first process: how many have come
    go, error TEXT      from the first process: all have come, or why the run cannot start
    beat                both ways, every few seconds
    bye                 this process has done its part: that its connection closes is no fault
    failed ID           this process ends with an error, which it reports itself
    lost ID TEXT        from the first process: another one was killed or is no longer heard of
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
_BEAT, _SILENCE = 5.0, 40.0  # seconds between signs of life, and without one until a process counts as lost
_RETRY = 0.2  # seconds between attempts to connect
_SLACK = 2.0  # seconds that the first process has to say why not all came, once a process has waited long enough
_OWN_ERROR = 2.0  # seconds for a process to report an error of its own, once another has failed
_LAST = 10.0  # seconds in which a process that failed ends, whatever its threads do
_MAX_LINE = 1024


class Address(NamedTuple):
    """Where the first process listens.

    Example:
        >>> Address.parse("[::1]:1234").bind
        '[::1]:1234'
        >>> Address.parse("localhost:1234").bind
        '127.0.0.1:1234'
    """

    text: str
    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        host, colon, port = text.rpartition(":")
        if not colon or not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--coordinator must be HOST:PORT with a port from 1 to 65535, got {text!r}")
        return cls(text, host.strip("[]"), int(port))

    @property
    def bind(self) -> str | None:
        """What to listen on: the address itself if it is a loopback address; None: all interfaces.

        Names are not looked up: many hosts find a loopback address under their own name.
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
        """Returns a listening socket; `UserError` if the port is taken."""
        try:
            if self.bind:
                host = self.bind.rpartition(":")[0].strip("[]")
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                return socket.create_server((host, self.port), family=family)
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", self.port))
        except OSError as error:
            raise UserError(f"--coordinator {self.text} cannot be bound: {_reason(error)}") from error


class Connection:
    """A socket that carries lines of text."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket, self._begun = connected, b""
        connected.settimeout(_BEAT)
        self.seen = time.monotonic()
        self.rank = -1  # until it has said which it is
        self.has_left = False
        self.unheard: list[str] = []  # lines that came right after the one that was waited for

    def receive(self) -> list[str] | None:
        """Returns the lines that are there, once the socket is readable; None if it is closed or sends no lines."""
        try:
            received = self.socket.recv(4096)
        except OSError:
            return None
        *lines, self._begun = (self._begun + received).split(b"\n")
        if not received or len(self._begun) > _MAX_LINE:
            return None
        self.seen = time.monotonic()
        return [line.decode("ascii", "replace") for line in lines]

    def send(self, line: str) -> None:
        """Sends a line; that the other has gone is noticed where it is read."""
        with contextlib.suppress(OSError):
            self.socket.sendall(line.encode("ascii", "replace") + b"\n")


class Peers:
    """The other processes of a run: a context manager around all that the run does once they have met.

    Args:
        address: Where the first process listens.
        count: How many processes there are.
        rank: Which one this is.
    """

    def __init__(self, address: Address, count: int, rank: int) -> None:
        self.address, self.count, self.rank = address, count, rank
        self.connections: list[Connection] = []
        self._ends: tuple[float, str, int] | None = None  # when this process ends at the latest, its line and its code

    def meet(self, timeout: float) -> None:
        """Waits until all have come.

        Raises:
            UserError: If the port is taken, or not all come in so many seconds, or two say that they are the same.
        """
        deadline = time.monotonic() + timeout
        if self.rank == 0:
            with self.address.listen() as server:
                self.connections = _Meeting(self, server, timeout).gather(deadline)
            for connection in self.connections:
                connection.send("go")
        else:
            self.connections = [self._join(deadline, timeout)]

    def came(self, number: int, timeout: float, missing: str = "") -> str:
        """Returns the line for too few."""
        return (
            f"--coordinator {self.address.text}: {number} of {self.count} processes came within {timeout:g} s "
            f"(--start-timeout){missing}"
        )

    def _join(self, deadline: float, timeout: float) -> Connection:
        """Returns a connection to the first process once that says that all have come."""
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
                if joined.getsockname() == joined.getpeername():  # where nobody listens, a socket may find itself
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
            f"--coordinator {self.address.text}: process 0 of {self.count} was not reached by process {self.rank} "
            f"within {timeout:g} s (--start-timeout): {reason}"
        )

    def _ask(self, connection: Connection, deadline: float) -> int:
        """Returns how many have come: all of them, or as many as when the time was up or the connection closed."""
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
                    connection.unheard = lines
                    return self.count
                if kind == "error":
                    raise UserError("".join(x for x in text if x.isprintable()))
                if kind != "came" or not text.isdecimal():
                    raise UserError(f"--coordinator {self.address.text}: another program answers there")
                came = min(int(text), self.count - 1)  # all is what `go` says
        return came

    def __enter__(self) -> Self:
        """Begins to watch the others."""
        for connection in self.connections:
            connection.socket.settimeout(_BEAT)
            connection.seen = time.monotonic()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Says how this process ends; an error whose cause is a lost process is left to the thread that watches."""
        if error is None:
            self._tell("bye")
            return
        if not isinstance(error, (UserError, RunError)) or self._ends:
            time.sleep(_OWN_ERROR + 1)  # the thread ends this process, with its line, if another is lost
        code = 2 if isinstance(error, UserError) else 1
        self._tell(f"failed {self.rank}")
        self._ends = (time.monotonic() + _LAST, "", code)
        atexit.register(self._leave, code)  # before JAX, which would wait for the others

    def _leave(self, code: int) -> NoReturn:
        """Ends this process at once; the first one after the others, which JAX aborts when it loses the first."""
        deadline = time.monotonic() + _OWN_ERROR + 1
        while self.rank == 0 and self.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _watch(self) -> None:
        """Ends this process when another is lost: the body of a thread."""
        selector, beaten = selectors.DefaultSelector(), time.monotonic()
        for connection in self.connections:
            selector.register(connection.socket, selectors.EVENT_READ, connection)
            for line in connection.unheard:
                self._hear(connection, line)
        while True:
            for key, _ in selector.select(0.5):
                lines = key.data.receive()
                for line in lines or ():
                    self._hear(key.data, line)
                if lines is None:
                    selector.unregister(key.fileobj)
                    self.connections.remove(key.data)
                    if not key.data.has_left:
                        self._end(self._from(key.data), "was killed, or its host is down")
            now = time.monotonic()
            if now - beaten >= _BEAT:
                beaten = now
                self._tell("beat")
                silent = (x for x in self.connections if now - x.seen > _SILENCE)
                for connection in silent:
                    self._end(self._from(connection), f"has not been heard of for {_SILENCE:g} s")
            if self._ends and now > self._ends[0]:
                _exit(*self._ends[1:])

    def _hear(self, connection: Connection, line: str) -> None:
        kind, _, text = line.partition(" ")
        if kind == "bye":
            connection.has_left = True
        elif kind == "lost":
            rank, _, how = text.partition(" ")
            self._end(int(rank), how)
        elif kind == "failed":
            connection.has_left = True
            if self.rank == 0:
                self._tell(line)
            if not self._ends:
                line = f"process {text} of {self.count} failed, and says why; this one ends too"
                self._ends = (time.monotonic() + _OWN_ERROR, line, 1)

    def _from(self, connection: Connection) -> int:
        return connection.rank if self.rank == 0 else 0

    def _tell(self, line: str) -> None:
        for connection in list(self.connections):
            connection.send(line)

    def _end(self, rank: int, how: str) -> None:
        """Ends this process and, if it is the first one, tells the others why; one that ends anyway goes on with it."""
        if self._ends:
            return
        if self.rank == 0:
            self._tell(f"lost {rank} {how}")
        _exit(f"process {rank} of {self.count} {how}; this one ends too (--resume continues)", 1)


def _reason(error: OSError) -> str:
    is_of_system = error.errno is not None and error.errno > 0 and not isinstance(error, socket.gaierror)
    return (os.strerror(error.errno) if is_of_system else error.strerror or str(error)).lower()


def _exit(line: str, code: int) -> NoReturn:
    if line:
        os.write(2, f"train_lm: {line}\n".encode())
    os._exit(code)


class _Meeting:
    """The first process's side of a meeting."""

    def __init__(self, peers: Peers, server: socket.socket, timeout: float) -> None:
        self.peers, self.server, self.timeout = peers, server, timeout
        self.strangers: set[Connection] = set()  # they have not yet said who they are
        self.joined: dict[int, Connection] = {}
        self.selector = selectors.DefaultSelector()

    def gather(self, deadline: float) -> list[Connection]:
        """Returns the connections to all other processes, by rank."""
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
        except OSError:  # it has gone again
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
        start = f"--coordinator {self.peers.address.text}"
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
