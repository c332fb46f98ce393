"""A Keras model with parameter servers: Keras' own loop on the chief deals batches to workers.

    train_step      deals the batch, in parts if the rule is synchronous; then the chief works on
                    tickets, too, until few enough of them wait
    metrics         reading them waits until all dealt batches are applied, and adds up the counts
                    of all workers
    everything else (evaluate, predict ...) runs on the chief alone, with the newest weights

The optimizer runs on the servers; its state is read when the model is saved and when the training
ends.
"""

from __future__ import annotations

from typing import Any

import keras
from torch import Tensor

from stratagem.capabilities import sentence
from stratagem.data.shares import rows
from stratagem.errors import NotDistributable, StratagemError, UsageError
from stratagem.frontends.keras import model_pickle
from stratagem.frontends.keras.adapter import KerasAdapter, device_name, trainable
from stratagem.frontends.keras.callback_needs import StatsCallback, portable
from stratagem.frontends.keras.driver import Call, Driver
from stratagem.frontends.keras.model_pickle import FollowerModel
from stratagem.frontends.keras.server_training import ServerTraining
from stratagem.frontends.keras.step_logs import has_own
from stratagem.frontends.keras.worker import assist, attend
from stratagem.frontends.keras.worker_session import adapter_of, dismiss, refuse
from stratagem.rules.stats import Stats
from stratagem.rules.updates import Synchronous
from stratagem.servers.client import Client
from stratagem.servers.task_main import current_worker, in_group
from stratagem.training.replica import END, CommandLoop, Replica, current_replica
from stratagem.training.settings import Served


class OnServers:
    """The chief's side of a model on the workers of parameter servers."""

    plays = ("train_step",)

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        #: made by the first step of a call
        self._training: ServerTraining | None = None
        self._adapter: KerasAdapter | None = None
        self._client: Client | None = None

    @property
    def adapter(self) -> KerasAdapter:
        assert self._adapter is not None
        return self._adapter

    @property
    def training(self) -> ServerTraining:
        assert self._training is not None
        return self._training

    @property
    def is_open(self) -> bool:
        return self._training is not None

    @property
    def _served(self) -> Served:
        served = self._driver.strategy.settings.served
        assert served is not None
        return served

    # --- calls ------------------------------------------------------------------------------

    def recompiled(self) -> None:
        """Nothing to do: the model is sent by every call."""

    def takes(self, call: Call) -> bool:
        return call.trains

    def inner_call(self) -> None:
        self._driver.settle()

    def start(self, call: Call) -> Any:
        driver, model = self._driver, self._driver.model
        if len(_stepping(model)) > 1:
            raise NotDistributable(sentence("servers", "several optimizers"))
        if model.compiled:
            refuse(model)
        if call.name == "fit":
            call.add(StatsCallback(self._stats))
        self._training = None
        seat = FollowerModel(driver.number, model, driver.strategy.settings)
        group = driver.strategy.replica_group
        return group.call(_perform, ((call, self), seat), sent=(None, seat))[0]

    def _stats(self) -> Stats | None:
        """Return the servers' counts in this training."""
        return None if self._training is None else self._training.client.stats()

    def lead(self, call: Call, client: Client, replica: Replica) -> Any:
        """As the chief, run the call while the other workers wait for tickets."""
        driver = self._driver
        self._client = client
        self._adapter = adapter_of(driver.model, replica)
        try:
            with driver.leads(call):
                result = call.run()
                driver.settle(state=True)
                if self._training is not None:
                    driver.follow_changes(last=True)
            self._end(result)
        except BaseException as error:
            if self._training is not None and not isinstance(error, StratagemError):
                self.training.rescue()
            raise
        finally:
            if self._training is not None:
                self.training.close()
            self._training = None
        return result

    def _end(self, result: Any) -> None:
        """End the training on all workers, with the chief's result."""
        apart = self._driver.strategy.replica_group.place is not None
        told = portable(result) if apart else None
        if self._training is None:
            assert self._client is not None
            dismiss(self._client, self._served, {"result": told})
        else:
            session = self.training.session
            session.end(session.last_words(told) if apart else {})

    # --- steps ------------------------------------------------------------------------------

    def prepare(self, data: Any) -> bool:
        if self._training is not None:
            self._driver.follow_changes()
            return True
        model = self._driver.model
        self.adapter.build(rows(data, 0, 1))
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return bool(model.trainable_variables)

    def shares(self, step: str) -> tuple[int, bool]:
        updates, workers, replica = self._served.updates, self._served.workers, self.adapter.replica
        parts = workers - updates.spares if isinstance(updates, Synchronous) else 1
        count = max(parts, 1) * (replica.count if in_group(replica) else 1)
        return (2, True) if count == 1 and workers > 1 else (count, False)

    def step(self, name: str, data: Any, total: int) -> Any:
        if self._training is None:
            assert self._client is not None
            told = self.adapter.described(rows(data, 0, 1), self._driver.seed())
            told["iterations"] = int(self._driver.model.optimizer._iterations)
            self._training = ServerTraining(self._driver, self.adapter, self._client, told)
        return self.training.step(data)

    # --- reading ----------------------------------------------------------------------------

    def settle(self, *, counts: bool, state: bool) -> None:
        """Wait until all dealt batches are applied, and read the weights.

        Until the next step callbacks may change the model, also temporarily.
        """
        training = self.training
        # a lossy codec sends rounded weights; callbacks are to see those that will be saved
        rounded = training.session.plan.codec.lossy
        ema = training.optimizer.use_ema
        whole = state or rounded or self._driver.needs.attributes or ema
        if training.is_open or (whole and not training.whole_here):
            self._driver.follow_changes()
            training.settle(whole=whole)

    def reset(self) -> None:
        self.training.drain()
        self.training.sums = {}
        self._driver.own("reset_metrics")()

    # --- what callbacks change ----------------------------------------------------------------

    def refuse_changes(self) -> None:
        training = self.training
        if self._driver.model.optimizer is not training.optimizer:
            raise UsageError(
                "the model's optimizer was replaced while it trains, which the servers cannot "
                "follow; compile the model again between two calls of fit."
            )
        training.client.set_settings(training.session.settings())

    def send_attributes(self, changes: list[Any]) -> None:
        if trainable(self._driver.model) != self.training.session.told["trainable"]:
            raise UsageError(sentence("servers", "what is trainable changed"))
        self.training.announce("attributes", changes)

    def send_tensors(self, written: list[tuple[int, Tensor]], *, last: bool) -> None:
        self.training.take_up(written, last=last)


def _stepping(model: Any) -> list[Any]:
    """Return the optimizers that a step may use. That of a part which was compiled before rarely
    steps; a worker refuses it when it does."""
    if not has_own(model, "train_step"):
        return model_pickle.optimizers(model.optimizer)
    parts = [p for p in model._flatten_layers(include_self=False) if isinstance(p, keras.Model)]
    old = [each for p in parts for each in model_pickle.optimizers(getattr(p, "optimizer", None))]
    idle = {id(each) for each in old if each is not model.optimizer}
    return [each for each in model_pickle.optimizers(model) if id(each) not in idle]


def _perform(mine: tuple[Call, OnServers] | None, seat: FollowerModel) -> Any:
    """On every device of every worker: lead the call, or work until the chief ends it."""
    replica = current_replica()
    with keras.device(device_name(replica)):
        if not in_group(replica):
            return _work(mine, seat, replica)
        if not replica.leads:
            return assist(seat, replica)
        result = _work(mine, seat, replica)
    CommandLoop(replica.collective).tell(END)
    return result


def _work(mine: tuple[Call, OnServers] | None, seat: FollowerModel, replica: Replica) -> Any:
    worker = current_worker()
    if mine is not None and worker.is_chief:
        call, side = mine
        return side.lead(call, worker, replica)
    # another client of the cluster has a model of its own
    model = seat.unpacked() if mine is None else mine[1]._driver.model
    return attend(worker, model, seat.settings, replica)
