"""Lists every private name of torch that the package uses, and why.

Private functions and classes are used through this module. Private attributes are read where they
are needed, and listed here. `tests/compat` fails for an unlisted private name, and for a listed
name that the installed torch does not have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.nn.modules import module as every_module
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

__all__ = ["BatchNorm", "OpOverload", "OpOverloadPacket", "TorchDispatchMode", "pytree"]

#: private name (tests/compat has an object of each kind), and why it is needed
PRIVATE = {
    "Tensor._base": "the tensor whose memory a view has",
    "Tensor._version": "counts writes in place: whether a tensor was changed since",
    "Tensor._backward_hooks": "hooks of the user on a gradient that is put together elsewhere",
    "Tensor._post_accumulate_grad_hooks": "hooks of the user, and ours, on finished gradients",
    "SparseTensor._indices": "rows of a sparse gradient that is not coalesced",
    "SparseTensor._values": "values of a sparse gradient that is not coalesced",
    "Module._parameters": "what a module holds itself, without the modules in it",
    "Module._buffers": "what a module holds itself, without the modules in it",
    "Module._modules": "what a module holds itself, by attribute",
    "Module._forward_hooks": "whether code of the user runs around a layer's forward",
    "Module._forward_pre_hooks": "the same; torch's older spectral norm lies there, too",
    "Module._backward_hooks": "whether code of the user runs around a layer's backward",
    "Module._backward_pre_hooks": "whether code of the user runs around a layer's backward",
    "StateDict._extra_state": "how state_dict names what get_extra_state returns",
    "torch.nn.modules.module._global_forward_hooks": "hooks of the user on every module",
    "torch.nn.modules.module._global_forward_pre_hooks": "hooks of the user on every module",
    "torch.nn.modules.module._global_backward_hooks": "hooks of the user on every module",
    "torch.nn.modules.module._global_backward_pre_hooks": "hooks of the user on every module",
    "torch.nn.modules.batchnorm._BatchNorm": "the class of all batch norms",
    "torch.nn.utils.parametrize._inject_new_class": "parametrized modules in another process",
    "torch.nn.utils.parametrize._inject_property": "parametrized modules in another process",
    "Optimizer._optimizer_step_pre_hooks": "hooks of the user on steps that are made elsewhere",
    "Optimizer._optimizer_step_post_hooks": "hooks of the user on steps that are made elsewhere",
    "ScheduledStep._wrapped_by_lr_sched": "a step() that a scheduler has replaced, not the user",
    "FusedAdam._step_supports_amp_scaling": "has a GradScaler call every step, skipped ones, too",
    "torch._foreach_copy_": "copies many tensors in one call",
    "torch._foreach_norm": "norms of many tensors in one call",
    "torch._fused_adam_": "Keras' Adam in one pass over memory",
    "torch._C._current_graph_task_id": "whether a forward runs again inside of backward",
    "torch._C._will_engine_execute_node": "whether this backward adds to a parameter's gradient",
    "torch.autograd.graph._get_grad_fn_or_grad_acc": "the node that adds to a gradient",
    "torch.autograd.Variable._execution_engine": "calls us when a backward pass has ended",
    "Node._input_metadata": "the shape of what a node of the graph has computed",
    "LossNode._saved_reduction": "whether a loss function was a mean or a sum",
    "LossNode._saved_self": "what a loss function was given",
    "LossNode._saved_target": "what a loss function was given",
    "LossNode._saved_weight": "what a loss function multiplied its values by",
    "LossNode._saved_total_weight": "what a cross entropy was divided by",
    "LossNode._saved_ignore_index": "which targets a cross entropy leaves out",
    "WhereNode._saved_condition": "which values of a sum are left out",
    "FillNode._saved_mask": "which values of a sum are left out",
    "ProductNode._saved_other": "the number that a loss was multiplied with",
    "SumNode._saved_dim": "along which axes a sum or a mean goes",
    "SumNode._saved_self_sym_sizes": "the shape that a sum or a mean was taken of",
    "IndexNode._saved_indices": "which rows were picked out of a batch",
    "torch._ops": "operators travel to other processes by name",
    "OpOverload._schema": "what an operator is called, and which arguments it writes to",
    "OpOverload._overloadname": "operators travel to other processes by name",
    "OpOverloadPacket._qualified_op_name": "operators travel to other processes by name",
    "torch.ops.aten._fused_dropout": "an operator that draws random numbers",
    "torch.ops.aten._sample_dirichlet": "an operator that draws random numbers",
    "torch.ops.aten._standard_gamma": "an operator that draws random numbers",
    "torch.utils._pytree": "the tensors inside of what a module is given and returns",
    "torch.utils._python_dispatch": "sees every operator of a run that must leave no trace",
    "torch.distributed.ProcessGroupGloo._Options": "a Gloo group on a chosen network device",
    "torch.distributed.Backend._plugins": "a group of a collective that a package has registered",
    "GroupOptions._timeout": "how long a collective may take",
    "GroupOptions._devices": "a Gloo group on a chosen network device",
}

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OPTIMIZER_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def has_global_hooks() -> bool:
    """Return whether torch has global hooks, which are called for every module."""
    return bool(
        every_module._global_forward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_backward_hooks
        or every_module._global_backward_pre_hooks
    )


def parametrized(original: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """Return an empty parametrized module of a class, with properties of these names."""
    module = original.__new__(original)
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)
    return module


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target."""
    if targets:
        torch._foreach_copy_(targets, sources)


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
    """Trace a function of tensors into a torch.fx module, with the operators of its backward."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(*inputs)


def scripted(graph: Any, inputs: Sequence[Tensor]) -> Any:
    """Compile a torch.fx module to TorchScript, which runs without Python."""
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        switches = any(isinstance(a, list) and type(a[0]) is bool for a in node.args if a)
        if switches and isinstance(node.target, OpOverload):  # lists that torch.jit.trace refuses
            node.target = _called(node.target, sorted({user.args[1] for user in node.users}))
    graph.recompile()
    with warnings.catch_warnings(), torch.no_grad():
        # torch.jit.trace is deprecated, but its successor needs a C++ compiler
        warnings.simplefilter("ignore")
        trace: Any = torch.jit.trace
        return trace(lambda *each: tuple(graph(*each)), tuple(inputs), check_trace=False)


def adam_loop(step: Any, weights: int, held: int, tensors: int, written: Sequence[int]) -> Any:
    """Return a TorchScript program of several scripted steps, each followed by an update of Adam.

    A step takes `held` tensors, the weights first, and a batch of `tensors` tensors; it returns the
    weights' gradients and the new values of the `written` ones. The program returns the last of
    both.
    """
    names = [f"h{i}" for i in range(held)]
    grads, params = [f"g{i}" for i in range(weights)], names[:weights]
    given = ", ".join([*names, *(f"batch[{i}]" for i in range(tensors))])
    lines = [
        "def steps(held: List[Tensor], batches: List[List[Tensor]], first: List[Tensor],",
        "          second: List[Tensor], times: List[Tensor], rate: float, beta1: float,",
        "          beta2: float, epsilons: List[float]):",
        *(f"    {name} = held[{i}]" for i, name in enumerate(names)),
        f"    params = [{', '.join(params)}]",
        "    grads: List[Tensor] = []",
        "    for i, batch in enumerate(batches):",
        f"        {', '.join([*grads, *(names[i] for i in written)])}, = step({given})",
        f"        grads = [{', '.join(grads)}]",
        f"        time = [{', '.join(['times[i]'] * weights)}]",
        "        torch._fused_adam_(params, grads, first, second, [], time, lr=rate, beta1=beta1,",
        "                           beta2=beta2, weight_decay=0.0, eps=epsilons[i],",
        "                           amsgrad=False, maximize=False)",
        f"    states: List[Tensor] = [{', '.join(names[i] for i in written)}]",
        "    return grads, states",
    ]
    return torch.jit.CompilationUnit("\n".join(lines) + "\n").steps


def _called(operator: OpOverload, wanted: Sequence[int]) -> Any:
    """Return a TorchScript function of an operator, which returns only the `wanted` results."""
    kinds = [str(each.type) for each in operator._schema.arguments]
    given = ", ".join(f"a{i}: {kind}" for i, kind in enumerate(kinds))
    call = f"torch.ops.{operator.overloadpacket}({', '.join(f'a{i}' for i in range(len(kinds)))})"
    results = "".join(f"found[{i}], " for i in wanted)
    source = f"def called({given}):\n    found = {call}\n    return ({results})\n"
    unit = torch.jit.CompilationUnit(source)

    def called(*given: Any) -> Any:
        return dict(zip(wanted, unit.called(*given), strict=True))

    return called


def norms(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each tensor."""
    return list(torch._foreach_norm(tensors, order))


def fused_adam(*tensors: list[Tensor], **settings: Any) -> None:
    """Update by Adam in one pass: params, grads, averages, squares, maxima, step counts."""
    torch._fused_adam_(*tensors, **settings)


def show_scaler(optimizer: Any, shown: bool = True) -> bool:
    """Have a GradScaler set `optimizer.found_inf` and call every step; return the old setting."""
    before = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    optimizer._step_supports_amp_scaling = shown
    return before


def in_backward() -> bool:
    """Whether autograd is running a backward pass on this thread."""
    return bool(torch._C._current_graph_task_id() >= 0)


def accumulator(param: Tensor) -> Any:
    """Return the node of the graph that adds to `param.grad`."""
    return torch.autograd.graph._get_grad_fn_or_grad_acc(param)


def will_run(node: Any) -> bool:
    """Whether the backward pass under way runs a node; raises RuntimeError in autograd.grad."""
    return bool(torch._C._will_engine_execute_node(node))


def after_backward(call: Callable[[], None]) -> None:
    """Call a function when the backward pass under way has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def gloo_options(timeout: timedelta, device: Any) -> Any:
    """Return the options of a Gloo group on one network device."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices = timeout, [device]
    return options


def registered_group(backend: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a group of a collective that a package has registered, such as torch_tpu's."""
    plugin = dist.Backend._plugins.get(backend.upper())
    return None if plugin is None else plugin.creator_fn(store, rank, size, timeout)


def nccl_options(timeout: timedelta) -> Any:
    """Return the options of an NCCL group."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return options
