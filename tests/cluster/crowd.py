"""An outsider without the secret that opens many connections, in a process of its own.

    with crowd(1000, ["127.0.0.1:2222"]) as outsider:   # holds 1,000 connections at each
        ...
    outsider.opened      # how many it has opened in all

A third say nothing, a third have said half of a greeting and closed their side, a third send
garbage. Whoever is hung up on comes again after a second.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.clock import PATIENCE

_OUTSIDER = r"""
import errno, os, resource, selectors, socket, sys, time

def address(text):
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)

os.nice(19)  # it must not take processor time from the job
count, places = int(sys.argv[1]), [address(each) for each in sys.argv[2:]]
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
WORDS = [b"", b"STRATGM\x04half", os.urandom(64)]
selector = selectors.DefaultSelector()
opened = heard = 0
due = [(0.0, number % len(WORDS), where) for where in places for number in range(count)]
over = False
selector.register(sys.stdin, selectors.EVENT_READ)  # ends with the parent

def knock(kind, where):
    sock = socket.socket(socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
    sock.setblocking(False)
    if sock.connect_ex(where) not in (0, errno.EINPROGRESS):
        return again(sock, kind, where)
    selector.register(sock, selectors.EVENT_WRITE, (kind, where))

def again(sock, kind, where):
    sock.close()
    due.append((time.monotonic() + 1.0, kind, where))

print("knocking", flush=True)
while not over:
    now = time.monotonic()
    ready, due = [each for each in due if each[0] <= now], [each for each in due if each[0] > now]
    for _, kind, where in ready[:200]:
        knock(kind, where)
    due += ready[200:]
    for key, events in selector.select(0.05):
        if key.fileobj is sys.stdin:
            over = True
            continue
        sock, (kind, where) = key.fileobj, key.data
        try:
            if events & selectors.EVENT_WRITE:
                failed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if failed:
                    raise OSError(failed, "")
                opened += 1
                if WORDS[kind]:
                    sock.send(WORDS[kind])
                if kind == 1:
                    sock.shutdown(socket.SHUT_WR)
                selector.modify(sock, selectors.EVENT_READ, key.data)
                continue
            if sock.recv(4096):
                heard += 1
                continue
        except OSError:
            pass
        selector.unregister(sock)
        again(sock, kind, where)
print(opened, heard, flush=True)
"""


class Outsider:
    """The outsider's counts, once it has ended."""

    opened = heard = 0


@contextmanager
def crowd(count: int, places: Sequence[str], inside: Sequence[str] = ()) -> Iterator[Outsider]:
    """Keep `count` connections at each place; `inside` is a command that runs it elsewhere."""
    outsider = Outsider()
    running = subprocess.Popen(
        [*inside, sys.executable, "-c", _OUTSIDER, str(count), *places],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent,
    )
    try:
        assert running.stdout is not None and running.stdout.readline() == "knocking\n"
        yield outsider
        said = running.communicate(timeout=PATIENCE)[0]
        outsider.opened, outsider.heard = map(int, said.split())
    finally:
        running.kill()
        running.wait()
