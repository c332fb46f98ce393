"""Run by scripts.py: imports torch once, then becomes a fork for each script that is ordered."""

import atexit
import gc
import json
import os
import select
import socket
import sys
from pathlib import Path

import torch
import torch._dynamo
import torchmetrics  # noqa: F401

import stratagem as sg  # noqa: F401
from stratagem.frontends import model  # noqa: F401

_channel = socket.socket(fileno=int(sys.argv[1]))
_file = _channel.makefile("rw")
_children: dict[int, str] = {}
gc.freeze()
if "triton" in sys.modules:  # it prints what it has bound and finds still there at the end
    atexit.register(gc.unfreeze)


def _reap() -> None:
    while _children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with open(_children.pop(pid), "w") as file:
            file.write(str(os.waitstatus_to_exitcode(status)))


print("ready", file=_file, flush=True)
while True:
    if not select.select([_channel], [], [], 0.02)[0]:
        _reap()
        continue
    _line = _file.readline()
    if not _line:
        os._exit(0)
    _order = json.loads(_line)
    _pid = os.fork()
    if not _pid:
        break
    _children[_pid] = _order["status"]
    print(_pid, file=_file, flush=True)
os.setsid()
_file.close()
_channel.close()
for _fd, _name in ((1, "out"), (2, "err")):
    os.dup2(os.open(_order[_name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), _fd)
sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
os.environ.update(_order["environ"])
os.chdir(_order["where"])
__file__ = _order["path"]
sys.argv = [__file__]
sys.path.insert(0, _order["where"])
torch.set_num_threads(1)
torch.seed()  # a fork would otherwise repeat its brothers' numbers
exec(compile(Path(__file__).read_text(), __file__, "exec"))
