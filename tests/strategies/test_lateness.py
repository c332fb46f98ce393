"""A replica that lives but does not come is named by those who wait for it."""

from __future__ import annotations

import logging
import time

import pytest

import stratagem as sg
from tests.support import strategy


@pytest.mark.timeout(60)
@pytest.mark.parametrize("op", ["shared_memory", "ring", "hierarchical"])
def test_the_late_one_is_named(op: str, caplog: pytest.LogCaptureFixture) -> None:
    def dawdle() -> None:
        replica = sg.current_replica()
        replica.barrier()
        if replica.index == 2:
            time.sleep(8)
        replica.barrier()

    made = strategy(3, cross_device_ops=op)
    with caplog.at_level(logging.WARNING, "stratagem"):
        made.run(dawdle)
    made.close()
    lines = [record.getMessage() for record in caplog.records if "waiting for" in record.message]
    assert lines and all("replica 2," in line and "replica 1" not in line for line in lines)
