"""One run of a check: call on every other task, and answer those that call."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
from collections.abc import Callable

from stratagem.cluster.dial import connect, listen
from stratagem.cluster.handshake import peer_name
from stratagem.cluster.spec import ClusterSpec, Task
from stratagem.cluster.trouble import Member
from stratagem.cluster.waiting import FIRST, Wait, say_missing
from stratagem.errors import ClusterError
from stratagem.launch import diagnosis
from stratagem.launch.diagnosis import Row
from stratagem.launch.probe import answer, introduce, measure

log = logging.getLogger("stratagem")

CONNECT = 3.0  # seconds for one try to connect
RETRY = 0.3  # seconds between two tries
REFUSALS = 5  # failures in a row, from the first certain one on, until we believe it


class RoundCall:
    """One run of a check: a caller for each other task, and an answering thread a visitor."""

    def __init__(self, spec: ClusterSpec, task: Task | None, secret: bytes, size: int) -> None:
        self._me = "" if task is None else str(task)
        self._places = {str(each): spec.address(each) for each in spec.tasks()}
        self._others = [name for name in self._places if name != self._me]
        self._secret = secret
        self._size = size
        self._rows: dict[str, Row] = {}
        self._visited_by: set[str] = set()
        self._changed = threading.Condition()
        self._measuring = threading.Lock()
        self._over = threading.Event()

    def run(self, wait: float) -> list[Row]:
        """Call until every task is reached and has reached us, or `wait` seconds are over."""
        listener = self._listen() if self._me in self._places else None
        try:
            for name in self._others:
                _thread(self._call_on, name)
            self._wait(Wait(wait, first=FIRST), listening=listener is not None)
        finally:
            self._over.set()
            if listener is not None:
                _shut(listener)
        with self._changed:
            return [self._final(name, listener is not None) for name in self._places]

    def _wait(self, patience: Wait, listening: bool) -> None:
        while True:
            with self._changed:
                missing = self._unfinished(listening)
                if not missing or patience.over:
                    return
                self._changed.wait(patience.pause)
            say_missing([Member(name, self._places[name]) for name in missing], patience)

    def _unfinished(self, listening: bool) -> list[str]:
        """Tasks not yet tried to an end, and those that we reached but that did not reach us."""
        rows = self._rows
        return [
            name
            for name in self._others
            if name not in rows
            or not rows[name].certain
            or (listening and rows[name].speed is not None and name not in self._visited_by)
        ]

    def _final(self, name: str, listening: bool) -> Row:
        row = self._rows.get(name)
        if row is None:
            problem = TimeoutError("timed out")
            return diagnosis.diagnose(name, self._places[name], problem)
        if listening and row.speed is not None and name not in self._visited_by:
            _, _, port = self._places[self._me].rpartition(":")
            remedy = (
                f"but it has not reached this task: is TCP port {port} open from there to here?"
            )
            return dataclasses.replace(row, remedy=remedy)
        return row

    def _record(self, row: Row) -> None:
        with self._changed:
            self._rows[row.task] = row
            self._changed.notify_all()

    def _call_on(self, name: str) -> None:
        """Try one task until it is measured, or certainly cannot be, or the check is over."""
        refusal, refusals = None, 0
        while not self._over.is_set():
            row = self._try(name)
            if row.certain and not row.ok:
                refusal = row
            if refusal is not None and not row.ok:
                # A peer that refused us and is gone now says no less than one that refuses still.
                row, refusals = refusal, refusals + 1
            certain = row.certain and (row.ok or refusals >= REFUSALS)
            if not self._over.is_set():
                self._record(dataclasses.replace(row, certain=certain))
            if certain:
                return
            self._over.wait(RETRY)

    def _try(self, name: str) -> Row:
        address = self._places[name]
        try:
            with connect(address, CONNECT) as sock:
                row = diagnosis.answered(name, address, introduce(sock, self._secret, self._me))
                if not row.ok or row.certain:
                    return row
                self._record(row)
                return self._measure(name, sock)
        except OSError as problem:
            return diagnosis.diagnose(name, address, problem)

    def _measure(self, name: str, sock: socket.socket) -> Row:
        try:
            with self._measuring:  # two at once would halve each other's bandwidth
                speed = measure(sock, self._size)
        except OSError as problem:
            return diagnosis.broke_off(name, self._places[name], problem)
        return diagnosis.measured(name, self._places[name], speed)

    def _listen(self) -> socket.socket | None:
        """Open this task's own port; a port that cannot be opened is a finding like others."""
        address = self._places[self._me]
        try:
            listener = listen(address, self._me)
        except ClusterError as problem:
            self._record(diagnosis.own(self._me, address, problem))
            return None
        self._record(diagnosis.own(self._me, address, None))
        _thread(self._accept, listener)
        return listener

    def _accept(self, listener: socket.socket) -> None:
        while not self._over.is_set():
            try:
                conn, _ = listener.accept()
            except OSError:
                return
            _thread(self._answer, conn)

    def _answer(self, conn: socket.socket) -> None:
        with conn:
            conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                visitor = answer(conn, self._secret, self._me)
            except OSError as problem:
                log.warning("refused a connection from %s: %s", peer_name(conn), problem)
                return
        with self._changed:
            self._visited_by.add(visitor)
            self._changed.notify_all()


def _thread(action: Callable[..., None], *args: object) -> None:
    threading.Thread(target=action, args=args, name="stratagem-check", daemon=True).start()


def _shut(listener: socket.socket) -> None:
    """End the accept() that another thread is in, which closing alone would not."""
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()
