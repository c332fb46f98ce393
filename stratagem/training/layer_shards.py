"""A module divided over replicas by torch's fully_shard, beside the module that it was made of.

    the user's module                     its twin, which trains
    weight [ . . . . ]   -- divided -->   weight [ . . ]        rows of replica 0
           (memory given back)                       [ . . ]    rows of replica 1

The twin shares buffers and code with the user's module. While it trains, each replica has its rows
of the parameters, of the gradients and of the optimizer's state; a layer's parameters are whole
while the layer runs. For callbacks, validation and files, `bring_home` gathers the parameters into
the user's module, and the optimizer's state on the chief.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from stratagem.errors import NotDistributable
from stratagem.state.optimizer_recipe import group_settings
from stratagem.training.replica import Replica
from stratagem.training.setup import keras_layer
from stratagem.wire.shard_group import shard_mesh
from stratagem.wire.torch_dist import TorchCollective
from stratagem.wire.tree import broadcast_tree

log = logging.getLogger("stratagem")

#: a layer with so many elements is gathered by itself
UNIT = 1 << 20


@dataclass
class ShardPiece:
    """One parameter: the user's, the twin's, and this replica's rows as a plain tensor."""

    name: str
    whole: nn.Parameter
    divided: nn.Parameter
    rows: Tensor
    shape: torch.Size
    chunk: int
    start: int

    def rows_of(self, whole: Tensor) -> Tensor:
        """This replica's rows of a tensor that is as large as the parameter."""
        return whole[self.start : self.start + len(self.rows)]


class LayerShards:
    """The rows that one replica has of a module and of its optimizer's state. Collective."""

    def __init__(self, module: nn.Module, optimizer: Optimizer, replica: Replica) -> None:
        _refuse(module)
        assert isinstance(replica.collective, TorchCollective)
        self.module, self.optimizer, self.replica = module, optimizer, replica
        self._collective = replica.collective
        self._held = ExitStack()
        mesh = self._held.enter_context(shard_mesh(self._collective, replica.device.type))
        try:
            self.run = _twin(module)
            for unit in units(self.run):
                fully_shard(unit, mesh=mesh)
            fully_shard(self.run, mesh=mesh)
            self.pieces = list(self._pieces())
            self.update = self._own_optimizer()
        except BaseException:
            self._held.close()
            raise
        #: whether the user's module has its parameters
        self.at_home = True
        self.doubles = any(piece.rows.dtype is torch.float64 for piece in self.pieces)

    def _pieces(self) -> Iterator[ShardPiece]:
        rank, size = self.replica.index, self.replica.count
        divided = dict(self.run.named_parameters())
        for name, whole in self.module.named_parameters():
            found = divided[name]
            if not isinstance(found, DTensor) or found.placements != (Shard(0),):
                raise NotDistributable(
                    f"parameter {name!r} was not divided by torch's fully_shard, so that each "
                    "replica would train it alone; use MirroredStrategy for this model."
                )
            chunk = -(-whole.shape[0] // size)
            rows = _rows(found)
            start = min(chunk * rank, whole.shape[0])
            assert len(rows) == min(chunk, whole.shape[0] - start)
            yield ShardPiece(name, whole, found, rows, whole.shape, chunk, start)

    def _own_optimizer(self) -> Optimizer:
        """The same optimizer over this replica's rows, with its rows of the state."""
        by_param = {piece.whole: piece for piece in self.pieces}
        groups = [
            {**group_settings(group), "params": [by_param[p].rows for p in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        made: Optimizer = type(self.optimizer)(groups)  # type: ignore[call-arg]
        for piece in self.pieces:
            for name, value in self.optimizer.state.get(piece.whole, {}).items():
                if isinstance(value, Tensor) and value.shape == piece.shape:
                    value = piece.rows_of(value).clone()
                elif isinstance(value, Tensor):
                    value = value.clone()
                made.state[piece.rows][name] = value
        return made

    def follow_settings(self) -> None:
        """Copy the settings of the user's optimizer, such as a changed learning rate."""
        groups = zip(self.optimizer.param_groups, self.update.param_groups, strict=True)
        for group, own in groups:
            own.update(group_settings(group))

    # --- one step -----------------------------------------------------------------------------

    def leave_home(self) -> None:
        """Copy what was written to whole parameters into the rows, and free their memory."""
        if not self.at_home:
            return
        self.at_home = False
        _carry(self.module, self.run)
        with torch.no_grad():
            for piece in self.pieces:
                piece.rows.copy_(piece.rows_of(piece.whole))
                piece.whole.data = piece.whole.data.new_empty(0)
        self.optimizer.state.clear()

    def gradients(self) -> list[Tensor | None]:
        """This replica's rows of each parameter's gradient."""
        found: list[Tensor | None] = []
        for piece in self.pieces:
            if _rows(piece.divided).data_ptr() != piece.rows.data_ptr():
                raise NotDistributable(
                    f"parameter {piece.name!r} was given other memory in mid-training (to() or "
                    "half() in forward?); leave parameters where they are."
                )
            grad = piece.divided.grad
            if grad is not None and not isinstance(grad, DTensor):
                raise NotDistributable(
                    f"the gradient of {piece.name!r} was not divided by torch's fully_shard; use "
                    "MirroredStrategy for this model."
                )
            found.append(None if grad is None else grad.to_local())
        return found

    def step(self, gradients: list[Tensor | None]) -> None:
        """Update this replica's rows."""
        for piece, gradient in zip(self.pieces, gradients, strict=True):
            piece.rows.grad = gradient
        self.update.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for piece in self.pieces:
            piece.rows.grad = piece.divided.grad = None

    # --- looking at the whole -----------------------------------------------------------------

    def bring_home(self) -> None:
        """The parameters into the user's module, the optimizer's state on the chief. Collective."""
        if self.at_home:
            return
        self.at_home = True
        _carry(self.run, self.module)
        with torch.no_grad():
            for piece in self.pieces:
                piece.whole.data = self._gathered(piece, piece.rows)
        self._bring_state()

    def _bring_state(self) -> None:
        """Gather the optimizer's state; replica 0, with rows of each parameter, knows the names."""
        state = self.update.state
        mine = [
            {n: isinstance(v, Tensor) and v.shape == p.rows.shape for n, v in state[p.rows].items()}
            if p.rows in state
            else {}
            for p in self.pieces
        ]
        for piece, names in zip(self.pieces, broadcast_tree(self._collective, mine), strict=True):
            own = state.get(piece.rows, {})
            for name, by_rows in names.items():
                value = own.get(name)
                if by_rows:
                    value = self._gathered(
                        piece, piece.rows.new_zeros(()) if value is None else value
                    )
                if self.replica.is_chief:
                    value = value.detach().cpu().clone() if isinstance(value, Tensor) else value
                    self.optimizer.state[piece.whole][name] = value

    def _gathered(self, piece: ShardPiece, rows: Tensor) -> Tensor:
        """Gather all replicas' rows of a tensor as large as a parameter."""
        padded = rows.new_zeros((piece.chunk, *piece.shape[1:]))
        if len(piece.rows):
            padded[: len(piece.rows)].copy_(rows)
        whole = padded.new_empty((self.replica.count * piece.chunk, *piece.shape[1:]))
        pending = self._collective.flat.gather_into(whole.view(-1), padded.view(-1))
        self._collective.named(pending.wait)
        return whole[: piece.shape[0]].clone() if len(whole) > piece.shape[0] else whole

    def close(self) -> None:
        """Bring the parameters home, and release torch's process group. Collective."""
        self.bring_home()
        self._held.close()

    def leave(self) -> None:
        """Close after a failure, in which the rows of the other replicas are lost."""
        self._held.close()
        if self.at_home:
            return
        with torch.no_grad():
            for piece in self.pieces:
                shape = piece.shape
                piece.whole.data = piece.rows.new_full(shape, float("nan"))
        log.error(
            "the training ended while the parameters were divided over the replicas, so the model "
            "here has none (all are NaN); go on from a checkpoint: fit(..., checkpoint=, "
            "resume=True), or model.load."
        )


def _rows(divided: Any) -> Tensor:
    """The memory in which this replica's rows of a parameter lie."""
    rows: Tensor = divided.detach().to_local()
    return rows


def units(module: nn.Module) -> list[nn.Module]:
    """Large layers of lists and sequences, each gathered by itself; a layer that shares a parameter
    with the outside is left out."""
    everywhere = _holders(module)

    def of(part: nn.Module) -> Iterator[nn.Module]:
        listed = isinstance(part, _LISTS)
        for child in part.children():
            inside = _holders(child)
            large = sum(p.numel() for p in inside) >= UNIT
            apart = all(everywhere[p] == count for p, count in inside.items())
            if listed and large and apart and not isinstance(child, _LISTS):
                yield child
            else:
                yield from of(child)

    return list(dict.fromkeys(of(module)))


_LISTS = (nn.ModuleList, nn.Sequential)


def _holders(module: nn.Module) -> Counter[nn.Parameter]:
    """How many layers hold each parameter."""
    return Counter(p for part in module.modules() for p in part.parameters(recurse=False))


def _twin(module: nn.Module) -> nn.Module:
    """The same layers over the same buffers, with parameters that can be replaced."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in module.buffers()}
    for param in module.parameters():
        memo[id(param)] = nn.Parameter(param.data, param.requires_grad)
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NotDistributable(
            f"the module cannot be copied ({error}), and ShardedStrategy divides a copy of it; "
            "take out what cannot be copied, or use MirroredStrategy."
        ) from error


_PLAIN = (bool, int, float, str, type(None), tuple)


def _carry(source: nn.Module, target: nn.Module) -> None:
    """Copy plain attributes and buffers of each layer: callbacks or forward may change them."""
    for old, new in zip(source.modules(), target.modules(), strict=True):
        plain = {k: v for k, v in vars(old).items() if isinstance(v, _PLAIN)}
        vars(new).update(plain)
        new._buffers.update(old._buffers)


def _refuse(module: nn.Module) -> None:
    if (keras := keras_layer(module)) is not None:
        raise NotDistributable(
            f"{keras!r} is a layer of Keras, which keeps its variables where torch's fully_shard "
            "does not see them, so that each replica would train alone; use MirroredStrategy."
        )
    for name, param in module.named_parameters():
        if param.dim() == 0:
            raise NotDistributable(
                f"parameter {name!r} is a single number without an axis, which fully_shard cannot "
                "divide; make it torch.zeros(1), or use MirroredStrategy."
            )
