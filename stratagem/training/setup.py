"""The setup of replicas before they train together: equal weights, random numbers, the reducer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

from stratagem.codecs.feedback import Feedback
from stratagem.codecs.reducer import Reducer
from stratagem.codecs.wire_choice import reducer
from stratagem.data.streams import RandomStreams, RngStates, mixed, seed_beside_torch, seed_torch
from stratagem.errors import NotDistributable
from stratagem.state.change_tracker import digest
from stratagem.state.optimizer_state import params_of, take_state
from stratagem.training.replica import Replica
from stratagem.training.settings import Settings
from stratagem.wire.collective import Collective
from stratagem.wire.device_kinds import kind_of
from stratagem.wire.tree import broadcast_tree, encode, gather_tree

log = logging.getLogger("stratagem")

_ROUNDS = 4

#: the distance between the seeds of two devices of a worker, larger than the number of workers
DEVICES = 4093


def align(module: nn.Module, replica: Replica, *, values: bool = True) -> None:
    """Check that a module has no lazy tensors; with `values`, copy the chief's to all replicas.
    Collective."""
    if replica.count == 1:
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise NotDistributable(
                f"{name!r} has no shape yet (a lazy module); run one batch through the model "
                "before it is distributed."
            )
    if values:
        spread([*module.parameters(), *module.buffers()], replica)


def spread(tensors: Sequence[Tensor], replica: Replica) -> None:
    """Copy the first replica's values to all others. Collective."""
    values = broadcast_tree(replica.collective, [t.detach() for t in tensors])
    if not replica.leads:
        with torch.no_grad():
            for mine, theirs in zip(tensors, values, strict=True):
                _unexpanded(mine).copy_(_unexpanded(theirs, mine))


def align_state(optimizer: Optimizer, replica: Replica, *, grown: bool | None = None) -> None:
    """Copy the chief's optimizer state to all replicas, unless they have the same: only the chief
    may have loaded a checkpoint. Collective.

    `grown`: whether the chief knows that a replica is new; None if it does not know.
    """
    if replica.count == 1:
        return
    params = params_of(optimizer)
    states = [optimizer.state.get(p, {}) for p in params]
    known = grown is not None and broadcast_tree(replica.collective, grown)
    if not known and _alike(states, replica):
        return
    theirs = broadcast_tree(replica.collective, [dict(state) for state in states])
    if replica.is_chief:
        return
    for param, state in zip(params, theirs, strict=True):
        take_state(optimizer, param, state)


def _alike(states: Sequence[Mapping[str, Any]], replica: Replica) -> bool:
    """Whether all replicas have the same state, by checksums."""
    looks = [
        {name: digest(v) if isinstance(v, Tensor) else v for name, v in state.items()}
        for state in states
    ]
    everybody = replica.collective.gather_bytes(encode(looks))
    return all(torch.equal(look, everybody[0]) for look in everybody)


def refuse_renormed(module: nn.Module) -> None:
    """Refuse layers whose lookup writes to their weights: each replica would write for the rows of
    its share only."""
    for name, part in module.named_modules():
        if getattr(part, "max_norm", None) is not None:
            raise NotDistributable(
                f"{name or type(part).__name__!r} has max_norm={part.max_norm}, with which forward "
                "rewrites the rows that it looks up, on each replica others; leave max_norm out, "
                "and limit the rows in a callback at the end of an epoch, or in your own loop."
            )


def refuse_frequencies(module: nn.Module) -> None:
    """Refuse layers whose gradient counts how often a row occurs in the batch: it occurs less often
    in a share or a microbatch."""
    for name, part in module.named_modules():
        if getattr(part, "scale_grad_by_freq", False):
            raise NotDistributable(
                f"{name or type(part).__name__!r} has scale_grad_by_freq=True, which divides the "
                "gradient of a row by how often the whole batch has it, and a replica or a "
                "microbatch has a part of the batch; leave it out, or use one device, a "
                "TensorParallelStrategy, or a PipelineStrategy with microbatches=1."
            )


def keras_layer(module: nn.Module) -> str | None:
    """Return the name of the first layer of Keras in a module; None if there is none."""
    for name, part in module.named_modules():
        if any(base.__module__.partition(".")[0] == "keras" for base in type(part).__mro__):
            return name or type(part).__name__
    return None


def _unexpanded(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor without the repetitions of `expand`."""
    strides = (tensor if like is None else like).stride()
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def roll_own_dice(replica: Replica, generation: int = 0) -> None:
    """Seed each replica differently, from the chief's seed.

    The chief keeps its own sequence, so that it shuffles as one device would.
    """
    if replica.count == 1:
        return
    if replica.leads:
        own = RngStates.of_caller().beside_torch()
        broadcast_tree(replica.collective, [torch.initial_seed() & (2**62 - 1), *own])
        return
    base, *others = broadcast_tree(replica.collective)
    seed_torch(mixed(base, replica.index, generation))
    seed_beside_torch(others, replica.index)


def roll_dice_of_devices(replica: Replica) -> None:
    """Seed the devices of one worker, unlike those of any other worker."""
    base = broadcast_tree(replica.collective, torch.initial_seed() & (2**62 - 1))
    if not replica.leads:
        seed_torch(mixed(base, DEVICES * replica.index))


def average_buffers(module: nn.Module, replica: Replica) -> None:
    """Average running statistics over the replicas. Collective.

    Each replica keeps its own integers, buffers whose shape has changed, and frozen parameters that
    forward writes to.
    """
    if replica.count == 1:
        return
    floats = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
    mine = {name: b.detach() for name, b in floats.items()}
    everybody = gather_tree(replica.collective, mine)
    for name, buffer in floats.items():
        values = [each[name].double() for each in everybody if name in each]
        if len(values) < replica.count or any(v.shape != buffer.shape for v in values):
            continue
        if all(torch.equal(value, values[0]) for value in values):
            continue  # unwritten: a backward to come may need it
        total = sum(values, torch.zeros(()).double())
        _unexpanded(buffer).copy_(_unexpanded(total / replica.count, buffer))


def take_iterated(module: nn.Module, replica: Replica) -> None:
    """Copy the chief's buffers of parametrizations (spectral_norm's vectors) to all. Collective.

    Every forward updates them from the weights alone, so they are the same on all replicas, unless
    one had no rows of a batch, and so no forward. The chief has rows of each batch.
    """
    mine = _iterated(module)
    if not mine:
        return
    values = broadcast_tree(replica.collective, [buffer.detach() for buffer in mine])
    if not replica.is_chief:
        with torch.no_grad():
            for buffer, theirs in zip(mine, values, strict=True):
                buffer.copy_(theirs)


def _iterated(module: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            found += part.buffers()
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):  # torch's older way
                found += [getattr(part, f"{hook.name}_{end}") for end in ("u", "v")]
    return found


def choose_reducer(params: Sequence[Tensor], replica: Replica, settings: Settings) -> Reducer:
    """Choose the reducer of gradients; "auto" measures the candidates on their size."""
    measures = settings.op == "auto" and replica.count > 1
    elements = sum(p.numel() for p in params)
    collective = _fastest(elements, replica) if measures else replica.collective
    made = reducer(collective, settings.wire if replica.count > 1 else None)
    if isinstance(made, Feedback):
        made.undoes = settings.elastic
    return made


def _fastest(elements: int, replica: Replica) -> Collective:
    known = replica.measured.get(elements)
    if known is not None:
        return known
    times: dict[str, float] = {}
    built: dict[str, Collective] = {}
    for op in replica.ops:
        name, collective = type(op).__name__, replica.open(op)
        built[name] = collective
        times[name] = _time(collective, elements, replica)
    best = min(times, key=lambda name: times[name])
    for name, collective in built.items():
        if name != best and collective is not replica.collective:
            collective.close()
    if replica.is_chief:
        figures = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())
        log.warning(
            'cross_device_ops="auto": %.1f MB of gradients on %d replicas: %s; taking %s',
            elements * 4e-6,
            replica.count,
            figures,
            best,
        )
    replica.measured[elements] = built[best]
    return built[best]


def _time(collective: Collective, elements: int, replica: Replica) -> float:
    """Return the seconds of the best round, the largest over the replicas."""
    flat = collective.buffer(elements, torch.float32, replica.device)
    best = float("inf")
    for _ in range(_ROUNDS):
        replica.barrier()
        start = time.perf_counter()
        collective.all_reduce(flat).wait()
        kind_of(flat.device).synchronize(flat.device)
        best = min(best, time.perf_counter() - start)
    return float(max(gather_tree(replica.collective, best)))


# --- before a call of fit, evaluate or predict ----------------------------------------------------


@contextmanager
def own_streams(
    replica: Replica, seed: int | None = None, *, renew: bool = False
) -> Iterator[None]:
    """On the chief: shuffle data independently of what, and how much, the model draws."""
    if not replica.is_chief:
        yield
        return
    around, replica.streams = replica.streams, (streams := RandomStreams(seed))
    try:
        yield
    finally:
        streams.end(renew=renew)
        replica.streams = around  # on one device, callbacks may evaluate


def align_loss(loss: Any, replica: Replica) -> None:
    """Align a loss that is a module of the user's. Collective."""
    if loss.own and isinstance(loss.function, nn.Module):
        align(loss.function, replica)


def move(module: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Move a module and its optimizer's state to the replica's device."""
    if any(t.device != device for t in (*module.parameters(), *module.buffers())):
        module.to(device)
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "step" and value.device != device:
                state[key] = value.to(device)
