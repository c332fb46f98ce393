"""The evaluator task does not train, whatever the script does in it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import stratagem as sg
from tests.clock import PATIENCE
from tests.served_support import digits, net
from tests.servers.server_threads import evaluator

pytestmark = pytest.mark.timeout(60)


def test_a_loop_of_ones_own_is_refused_and_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    x, y, _, _ = digits()
    with evaluator() as (job, strategy):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y))
        words = r"is the evaluator.*strategy\.audience is not None.*strategy\.audience\.over\(\)"
        with pytest.raises(sg.NotDistributable, match=words):
            strategy.prepare(model, optimizer, loader)
        with pytest.raises(sg.NotDistributable, match=words):
            strategy.run(lambda: strategy.prepare(model, optimizer, loader))
        assert not strategy.is_chief and not sg.current_replica().is_chief
        seen = strategy.run(lambda: (sg.current_replica().is_chief, sg.current_replica().name))
        assert seen == [(False, "evaluator")]
        assert strategy.stats().received == 0  # a script may print them on every task
        assert strategy.audience is not None and not strategy.audience.over()
        for worker in job.workers:
            worker.close()
        for thread in job.threads:
            thread.join(PATIENCE)
        assert strategy.audience.over()
    assert sg.current_replica().is_chief  # nobody's evaluator any more


def test_its_history_has_what_the_chief_wrote_down(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A script may read the loss of the training in every task."""
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    x, y, _, _ = digits()
    chief = sg.Model(net())
    chief.compile("sgd", "cross_entropy")
    trained = chief.fit(
        x,
        y,
        batch_size=700,
        epochs=2,
        verbose=0,
        callbacks=[sg.callbacks.ModelCheckpoint(str(tmp_path / "last"))],
    )
    with evaluator() as (job, strategy):
        model = sg.Model(net(), strategy)
        model.compile("sgd", "cross_entropy")
        over = threading.Timer(0.5, job.close)
        over.start()
        seen = model.fit(
            x,
            y,
            batch_size=700,
            validation_data=(x, y),
            verbose=0,
            callbacks=[sg.callbacks.ModelCheckpoint(str(tmp_path / "last"))],
        )
        over.join()
        assert seen.history["loss"] == trained.history["loss"]
        assert len(seen.history["val_loss"]) == 1
