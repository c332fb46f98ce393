"""A custom loop on several devices of one worker, which share every ticket.

    first device    gets the tickets (ticket_loop.py); sends payloads and values to the others
    other devices   compute their share of the rows; their step() pushes nothing

Every backward leaves the gradient of the whole ticket on each device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from stratagem.capabilities import sentence
from stratagem.data.shares import rows, rows_of, share
from stratagem.errors import NotDistributable, UsageError
from stratagem.servers.batch_source import read
from stratagem.training import fingerprint, setup
from stratagem.training.custom_loop import reader_of
from stratagem.training.prepare import join_gradients, part_gradients, to_device
from stratagem.training.replica import CommandLoop, Replica
from stratagem.training.settings import Settings


class LoopDeviceGroup:
    """The devices of one worker, as used by each of them."""

    def __init__(
        self, replica: Replica, model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]
    ) -> None:
        self._replica, self._model, self._loader = replica, model, loader
        self._params = [p for p in model.parameters() if p.requires_grad]
        #: whether all devices have the newest values since the last step
        self.up_to_date = False
        look = fingerprint.of_loader(loader, "the loader")
        reader = reader_of(replica)
        assert reader is not None and reader.pushes is not None
        self.weights = reader.pushes
        # the strategy's wire is for what goes to the servers
        self.exchange = join_gradients(replica, Settings(), model, optimizer, look, reader)
        setup.roll_dice_of_devices(replica)
        self.commands = CommandLoop(replica.collective)

    def spread(self) -> None:
        """Take the first device's values."""
        setup.spread(self._params, self._replica)
        self.up_to_date = True

    def share(self, payload: Any) -> tuple[Any, int]:
        """Return this device's rows of a ticket, and the size of it, with the newest values."""
        if not self.up_to_date:
            self.spread()
        self.up_to_date = False
        whole = payload.get("indices")
        total = rows_of(payload["rows"]) if whole is None else len(whole)
        start, end = share(total, self._replica.count, self._replica.index)
        self._replica.share.set(end - start, total)
        if start == end:  # an empty share borrows an example, which weighs nothing
            start, end = 0, 1
        if whole is None:
            part = rows(payload["rows"], start, end)
        else:
            part = read(self._loader, whole[start:end])
        return part, 0 if "borrowed" in payload else total

    def set_part(self, part: float) -> None:
        """Note the part of the batch that the ticket is."""
        self._replica.share.part = part

    def average(self) -> None:
        """Average the running statistics of all devices."""
        setup.average_buffers(self._model, self._replica)

    def align(self) -> None:
        """Take all values of the first device."""
        setup.align(self._model, self._replica)

    @property
    def in_trouble(self) -> bool:
        """Whether a device has failed."""
        return self._replica.membership.trouble is not None

    def remove(self) -> None:
        """Remove the hooks: the training is over."""
        part_gradients(self._model, self._replica)


#: the loader of this device
_present: GroupLoader | None = None


class GroupLoader:
    """Iterates over this device's shares of the first device's tickets."""

    def __init__(
        self, replica: Replica, model: nn.Module, optimizer: Optimizer, loader: DataLoader[Any]
    ) -> None:
        global _present
        end_assistance()
        _present = self
        self.loader, self.device = loader, replica.device
        self.dataset, self.batch_size = loader.dataset, loader.batch_size
        self._group = LoopDeviceGroup(replica, model, optimizer, loader)
        _, (self._over, parts, self._in_step) = self._group.commands.hear()
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._carry = Accumulation(self._params, parts)
        self._held = self._ended = False
        self._hook = optimizer.register_step_pre_hook(self.hand_in)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if self._over:
            return
        if self._ended:
            raise UsageError("the training of this loader has ended; prepare it again.")
        self._expect("pass")
        self._group.up_to_date = False
        while True:
            word, payload = self._expect("batch", "pass over", "over")
            if word != "batch":
                break
            batch, examples = self._group.share(*payload)
            total = int(payload[0]["total"])
            self._carry.begin(examples, total)
            self._group.weights.begin()
            self._group.set_part(examples / max(total, 1))
            self._held = True
            yield batch if self.device.type == "cpu" else to_device(batch, self.device)
            if self._held:
                self._carry.keep()
        if word == "over":
            self._over = True
        else:
            self._group.average()
        self._group.align()

    def _expect(self, *verbs: str) -> tuple[str, list[Any]]:
        verb, arguments = self._group.commands.hear()
        if verb not in verbs:
            raise UsageError(
                "this device and the first of its worker have left their loops at different "
                "batches, and they share each of them; decide by what all of them know alike (a "
                "number of batches, sg.current_replica().all_reduce of the loss)."
            )
        return verb, arguments

    def hand_in(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: drop the gradients, which the first device pushes."""
        if not self._held:
            raise UsageError(sentence("servers", "batches fetched ahead"))
        self._held = False
        self._carry.drop()
        for param in self._params:
            param.grad = None
        if self._in_step:
            self._expect("values")
            self._group.spread()

    def end(self) -> None:
        """Take the last values: the first device has ended the training."""
        self._ended = True
        self._hook.remove()
        self._group.remove()
        self._group.align()


def end_assistance() -> None:
    """On other devices than the first: end the present loop, if there is one."""
    global _present
    ended, _present = _present, None
    if ended is not None:
        ended.end()


class Accumulation:
    """Gradients accumulated in `grad` over several batches.

    A push has the weight of its last batch's part, so earlier gradients are scaled to that weight.
    """

    def __init__(self, params: Sequence[Tensor], parts: int) -> None:
        self._params, self._parts = params, parts
        #: whether there are earlier gradients, and this worker's share of the last batch
        self._here, self._share = False, 1.0

    def begin(self, examples: int, total: int) -> None:
        """Begin a batch, of which this worker has `examples` out of `total`."""
        if self._parts == 1:
            return
        share = examples / max(total, 1)
        if self._here and total < self._parts:
            raise NotDistributable(
                f"gradients are added up over batches, and one of {total} examples has none for "
                f"some of {self._parts} workers, whose gradients would be lost; give the loader "
                "drop_last=True, or another batch_size."
            )
        if self._here and share and share != self._share:
            for param in self._params:
                if param.grad is not None:
                    param.grad.mul_(self._share / share)
        self._share = share

    @property
    def is_here(self) -> bool:
        """Whether there are gradients of earlier batches."""
        return self._here

    def keep(self) -> None:
        """Keep the gradients; the loop made no step."""
        self._here = any(param.grad is not None for param in self._params)

    def drop(self) -> None:
        """Forget the gradients; they were pushed."""
        self._here = False
