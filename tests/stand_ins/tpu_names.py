"""A plugin for pytest: tests that train on "cpu:i" do so on "tpu:i" of the stand-in."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests import support

HERE = str(Path(__file__).parent)
sys.path.insert(0, HERE)
os.environ["PYTHONPATH"] = f"{HERE}:{os.environ.get('PYTHONPATH', '')}"
os.environ.setdefault("STAND_IN_TPUS", "8")
os.environ.setdefault("STAND_IN_CLAIMS", str(Path(tempfile.mkdtemp()) / "claims"))
# the launch variables are those of one set of TPUs; each test has its own
os.environ |= {
    "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:1",
    "TORCH_TPU_TOPOLOGY": "2,2,1",
    "TORCH_TPU_XPROF_SESSION_ID": "1",
}
support.cpus = lambda count: [f"tpu:{i}" for i in range(count)]
