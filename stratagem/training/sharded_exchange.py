"""A committer that keeps one set of gradients for all replicas of a machine.

    backward fires the hook -> added to the sum in shared memory -> p.grad is dropped

So a replica holds only the gradient that backward is making, and a few that wait for their turn
(wire/ordered_sum.py); the sum costs 1/N of the parameters' memory per replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from stratagem.capabilities import sentence
from stratagem.codecs.reducer import Reducer
from stratagem.errors import NotDistributable
from stratagem.state.factors import Factors
from stratagem.state.optimizer_state import params_of
from stratagem.state.partition import place
from stratagem.state.shared_model import OwnedState, SharedTensors, WriteWatch
from stratagem.training.exchange import GradientExchange, write_notes
from stratagem.training.replica import Replica
from stratagem.wire.collective import Pending
from stratagem.wire.ordered_sum import OrderedSum
from stratagem.wire.shared_memory import sharing


class OneSum(Reducer):
    """A reducer whose buffer is the one sum of all replicas."""

    lossy = True  # so that the notes lie apart, with a row for each replica

    def __init__(self, sums: OrderedSum) -> None:
        self.sums = sums

    def buffer(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert count == len(self.sums.flat)
        return self.sums.flat

    def reduce(self, flat: Tensor, weight: float) -> Pending:
        raise AssertionError("these gradients are added up as they come")


class ShardedExchange(GradientExchange):
    """The committer that adds gradients to one sum in shared memory; `p.grad` stays None."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        replica: Replica,
        reducer: Reducer,
        **options: Any,
    ) -> None:
        trained = [(n, p) for n, p in named if p.requires_grad]
        self._names = [name for name, _ in trained]
        # a bucket has the last parameter first, as backward makes them
        self._last = len(trained) - 1
        self.sums = OrderedSum(
            [p.numel() for _, p in reversed(trained)], sharing(replica.collective)
        )
        self._had: set[int] = set()
        super().__init__(named, replica, OneSum(self.sums), **options)

    def begin_step(self) -> None:
        """Begin the gradients of an update."""
        self.sums.begin_step()
        self._had.clear()

    def _ready(self, param: Tensor) -> None:
        if param.grad is not None:
            self._take(self._index[param])  # type: ignore[index]

    def _take(self, index: int) -> None:
        param = self.buckets.params[index]
        grad, part = param.grad, self._last - index
        assert grad is not None
        if grad.layout != torch.strided:
            raise NotDistributable(sentence("replicas", "sparse gradients"))
        if self.sums.has(part):
            raise NotDistributable(
                f"parameter {self._names[index]!r} gets its gradient in several parts of one "
                "backward pass (checkpoint with use_reentrant=True does that), and ShardedStrategy "
                "keeps none of them; say use_reentrant=False, or use MirroredStrategy."
            )
        self._had.add(index)
        self.sums.add(part, grad)
        param.grad = None

    def used(self) -> list[bool]:
        """Return for every parameter whether it has a gradient here."""
        return [i in self._had for i in range(len(self._names))]

    def end_pass(self) -> None:
        """End a backward pass, also where this replica had no rows. Collective."""
        for index, param in enumerate(self.buckets.params):
            if param.grad is not None:  # set by the user's code
                self._take(index)
        self.sums.end_pass()

    def stage(
        self, notes: Sequence[float | Tensor], factors: Mapping[int, Factors] | None = None
    ) -> None:
        """Write the notes, and which parameters have a gradient here."""
        has = self.used()
        for i, each in (factors or {}).items():
            each.mark(has[i])
            has[i] |= each.kept
        write_notes(self.buckets.notes, notes)
        self.buckets.used.copy_(torch.tensor(has, dtype=torch.float32))


# --- Custom loops of CPU replicas that have one set of parameters and optimizer state -------------
#
#     backward          leaves the gradient of the global batch, whole, on every replica
#     optimizer.step    steps about 1/N of the parameters here, the others elsewhere
#
# So a loop may clip, read or change gradients as usual. Parameters lie in shared memory; the state
# is created where a parameter is stepped, and the first replica sees all of it. What a loop writes
# itself would be written once by each replica, and is refused.


def refuse_loop(replica: Replica, optimizer: Optimizer) -> None:
    """Refuse parameters or an optimizer that replicas cannot update in parts."""
    if not replica.collective.shares_memory:
        raise NotDistributable(
            "between machines and on GPUs a replica of ShardedStrategy has rows of each parameter, "
            "and a loop of your own updates whole ones; use sg.Model(...).fit, or "
            "MirroredStrategy.prepare."
        )
    if not type(optimizer).__module__.startswith("torch."):
        raise NotDistributable(
            f"each replica of ShardedStrategy steps the optimizer on some of the parameters, and "
            f"{type(optimizer).__name__} is not one of torch's, so that it may look at all of "
            "them; use one of torch.optim, or MirroredStrategy."
        )


class SharedUpdate:
    """Hooks around `optimizer.step`: each replica steps its parameters. Made collectively."""

    def __init__(self, replica: Replica, optimizer: Optimizer) -> None:
        collective = sharing(replica.collective)
        self._replica, self._collective = replica, collective
        self._params = params = params_of(optimizer)
        homes = place([p.numel() for p in params], replica.count)
        self._owned = {p for p, home in zip(params, homes, strict=True) if home == replica.index}
        self._others = [p for p in params if p not in self._owned]
        self._shared = SharedTensors(params, collective)
        self._state = OwnedState(optimizer, self._owned, leads=replica.leads)
        self._optimizer, self._watch = optimizer, WriteWatch(self._shared, self._owned)
        self._mark_state()
        self._gradients: list[Tensor | None] = []
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(each is not None for each in (*args[1:], *kwargs.values())):
            raise NotDistributable(
                "optimizer.step(closure) evaluates the loss while replicas update their parts of "
                "the parameters; call backward first and step() without a closure, or use "
                "MirroredStrategy."
            )
        self.check()
        self._check_state()
        self._gradients = [p.grad for p in self._others]
        for param in self._others:
            param.grad = None
        self._collective.barrier()  # no replica reads the parameters any more

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param, gradient in zip(self._others, self._gradients, strict=True):
            param.grad = gradient
        self._gradients = []
        self._shared.take_back(self._owned)
        self._state.share(self._collective)
        self._watch.mark()
        self._mark_state()

    def check(self) -> None:
        """Refuse weights that were written since the last step."""
        if self._watch.written():
            raise NotDistributable(sentence("sharded", "weights written outside of steps"))

    def _values(self) -> list[Any]:
        state = self._optimizer.state
        return [value for p in self._params for value in state.get(p, {}).values()]

    def _written(self) -> tuple[int, list[float]]:
        """Return how often the state was written to, and an element of each tensor that is updated
        here: `.data` has no version."""
        some = [float(value.detach().flatten()[value.numel() // 2]) for value in self._mine]
        return sum(each._version for each in self._known if isinstance(each, Tensor)), some

    def _mark_state(self) -> None:
        self._all_state, self._known = self._optimizer.state, self._values()
        mine = (v for p in self._owned for v in self._optimizer.state.get(p, {}).values())
        self._mine = [v for v in mine if isinstance(v, Tensor) and v.numel()]
        self._writes = self._written()

    def _check_state(self) -> None:
        """Take over state that was loaded or cleared; refuse other writes to it."""
        state = self._optimizer.state
        written = self._written() != self._writes
        if written or list(map(id, self._values())) != list(map(id, self._known)):
            if written or (state and state is self._all_state):
                raise NotDistributable(sentence("sharded", "optimizer state written in a loop"))
            self._state.renew()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._shared.close()
