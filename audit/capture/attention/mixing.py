"""Check that positions exchange information through the captured attention alone."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.banded import padded_length
from audit.capture.attention.interface import AttentionCall
from audit.capture.attention.layers import CapturePlan
from audit.capture.attention.passes import exclusive, run_model, watched
from audit.errors import CaptureError

# Largest allowed change at untouched positions, relative to the change at the touched ones.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 1e-1}


@dataclass
class _Trace:
    """What one pass did: each attention call's output and weights in brief, and the last block's output."""

    outputs: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    inputs: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict)
    summaries: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    final: Tensor | None = None
    touched: bool = False


def check_mixing(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], length: int, stack: str | None = None
) -> None:
    """Check that nothing but the captured attention lets one position see another.

    The input of the first block is changed at every other position while each attention layer gives what
    it gave before. A block's output at the positions that were left alone must then stay what it was;
    convolutions, recurrences, pooling or attention that was not captured would change it.

    Parameters
    ----------
    model : model of transformers
    plan : CapturePlan
    tensors : mapping of argument to Tensor
        One probe.
    length : int
        Its number of positions in `stack`.
    stack : str, optional
        Which stack; the first when None.

    Raises
    ------
    CaptureError
        Naming the stack whose positions mix by other ways.
    """
    if length < 2:
        return
    stack = plan.stacks[0] if stack is None else stack
    length = max(padded_length(layer.module, length) for layer in plan.layers if layer.stack == stack)
    plain = _pass(model, plan, tensors, stack)
    for parity in (0, 1):
        odd = torch.arange(length) % 2 == parity
        changed = _pass(model, plan, tensors, stack, odd=odd, before=plain)
        _compare(model, stack, plain, changed, odd)
    _check_order(model, plan, tensors, stack, plain)


def _check_order(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], stack: str, plain: _Trace
) -> None:
    """Check that the layers stand behind each other: the first one's output reaches all that follow.

    Layers side by side (two branches over one input) would be multiplied in an order that they lack.
    """
    stacks = {layer.path: layer.stack for layer in plan.layers}
    order = [index for index in plain.summaries if stacks[index[0]] == stack]
    first = [index for index in order if index[0] == order[0][0]] if order[0][0] in plan.pieces else order[:1]
    nudged = _Trace()
    if order[0] in plain.outputs:
        nudged.outputs.update({index: _jolted(plain.outputs[index]) for index in first})
    else:
        projection, taken = plain.inputs[order[0][0]][0]
        nudged.inputs[order[0][0]] = [(projection, _jolted(taken))]
    after = _pass(model, plan, tensors, stack, before=nudged)
    for index in order[len(first) :]:
        if torch.equal(plain.summaries[index], after.summaries[index]):
            raise CaptureError(
                f"{type(model).__name__}: attention layer {index[0]} does not see what {order[0][0]} "
                "gives, so the layers do not follow one another; no exact rollout exists for it"
            )


def _compare(model: nn.Module, stack: str, plain: _Trace, changed: _Trace, odd: Tensor) -> None:
    name = type(model).__name__
    if plain.final is None or changed.final is None or not changed.touched:
        raise CaptureError(
            f"{name}: the blocks {stack or 'of the model'} do not pass on one vector for each position; "
            "this architecture is not supported"
        )
    difference = (plain.final.double() - changed.final.double()).abs()
    if len(odd) not in difference.shape[:-1]:
        raise CaptureError(
            f"{name}: the blocks {stack} give {tuple(difference.shape)}, expected {len(odd)} positions; "
            "this architecture is not supported"
        )
    axis = _axis(difference, len(odd))
    difference, odd = difference.transpose(0, axis).flatten(1).amax(dim=1), odd.to(difference.device)
    moved, leaked = float(difference[odd].amax()), float(difference[~odd].amax())
    if moved == 0:
        raise CaptureError(f"{name}: the blocks {stack} pass nothing on; this architecture is not supported")
    if not leaked <= TOLERANCE[plain.final.dtype] * max(moved, 1e-6):
        raise CaptureError(
            f"{name}: positions mix outside the captured attention in {stack or 'the model'} (a change of "
            f"{moved:.2g} moves other positions by {leaked:.2g}); no exact rollout exists for it"
        )


def _pass(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    stack: str,
    *,
    odd: Tensor | None = None,
    before: _Trace | None = None,
) -> _Trace:
    trace, calls = _Trace(), Counter[str]()

    def receive(call: AttentionCall) -> Tensor | None:
        index = (call.path, calls[call.path])
        calls[call.path] += 1
        trace.summaries[index] = call.weights.detach().double() @ _ramp(call.weights.shape[-1], call.weights)
        if before is not None:
            return before.outputs.get(index)
        if call.projection:
            trace.inputs.setdefault(call.path, []).append((call.projection, call.output.flatten(2)))
        else:
            trace.outputs[index] = call.output if call.returned is None else call.returned
        return None

    replay = None if before is None else before.inputs
    with (
        exclusive(model, plan.configs),
        watched(plan, receive, None, replay, whole=False),
        _blocks(model, plan, stack, odd, trace),
    ):
        run_model(model, tensors, attentions=plan.has_hooks)
    return trace


@contextmanager
def _blocks(
    model: nn.Module, plan: CapturePlan, stack: str, odd: Tensor | None, trace: _Trace
) -> Iterator[None]:
    """Change the input of the first block that runs, and keep the output of the last one."""
    thread = threading.get_ident()
    blocks = list(model.get_submodule(stack).children()) if stack else []
    spread = any(block in plan.modules().values() for block in blocks)
    if spread:
        blocks = _beside(model, stack)

    def before(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != thread or trace.touched or odd is None:
            return None
        where = find_stream(args, kwargs, len(odd))
        if where is None:
            return None
        trace.touched = True
        hidden = args[where] if isinstance(where, int) else kwargs[where]
        noisy = _noisy(hidden, odd)
        if spread:
            hidden.copy_(noisy)  # the residual is the same tensor
            return None
        if isinstance(where, int):
            return tuple(noisy if i == where else item for i, item in enumerate(args)), kwargs
        return args, {**kwargs, where: noisy}

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if threading.get_ident() == thread and isinstance(first, Tensor) and first.dim() >= 2:
            trace.final = first

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        yield


def _beside(model: nn.Module, stack: str) -> list[nn.Module]:
    """Return the modules of blocks whose parts stand in lists of their own beside each other (XLM)."""
    lists = list(model.get_submodule(stack.rpartition(".")[0]).children())
    size = len(list(model.get_submodule(stack).children()))
    alike = [one for one in lists if isinstance(one, nn.ModuleList) and len(one) == size]
    return [block for one in alike for block in one]


def find_stream(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], length: int | None = None
) -> int | str | None:
    """Return which argument of a block is its stream: (batch, position, …, dim) or (position, dim).

    With `length` it must have as many positions.
    """
    candidates: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for where, value in candidates:
        is_stream = isinstance(value, Tensor) and value.dim() >= 2 and value.is_floating_point()
        if is_stream and (length is None or length in value.shape[:-1]):
            return where
    return None


def _ramp(keys: int, like: Tensor) -> Tensor:
    return torch.arange(1, keys + 1, dtype=torch.float64, device=like.device).sqrt()


def _jolted(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(output.shape, generator=generator, dtype=torch.float32).to(output)
    return output + noise * output.detach().float().std().clamp_min(1e-3).to(output)


def _noisy(hidden: Tensor, odd: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(hidden.shape, generator=generator, dtype=torch.float32).to(hidden)
    scale = hidden.detach().float().std().clamp_min(1e-3).to(hidden)
    shape = [1] * hidden.dim()
    shape[_axis(hidden, len(odd))] = len(odd)
    return torch.where(odd.to(hidden.device).view(shape), hidden + scale * noise, hidden)


def _axis(hidden: Tensor, length: int) -> int:
    """Return the axis of the positions: the second, else the first that has their number."""
    axes = [i for i, size in enumerate(hidden.shape[:-1]) if size == length]
    return 1 if 1 in axes else axes[0]
