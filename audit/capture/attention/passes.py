"""Run one batch through a model, with or without watching its attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from audit.capture.attention.banded import given_length
from audit.capture.attention.check import check_counts, check_rows, check_values
from audit.capture.attention.hooks import Replay, counted_calls, hook_capture
from audit.capture.attention.interface import (
    AttentionCall,
    KernelCall,
    Receiver,
    Replacing,
    config_locks,
    interface_capture,
)
from audit.capture.attention.layers import CapturePlan, expected_calls, narrow_plan
from audit.capture.attention.pieces import joined_pieces
from audit.capture.attention.scratch import Scratch
from audit.capture.attention.switching import unswitched
from audit.capture.engines.fold import BatchFold
from audit.capture.inputs.encoded import accepted_arguments, core_model, uncompiled
from audit.errors import CaptureError


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put `model` in eval mode, uncompiled, without gradients and with a fixed random state; all comes back.

    Compiled code would be compiled again for each length, and around every call that is watched.

    Raises
    ------
    CaptureError
        When the model is spread over devices, or parts of it are not loaded.
    """
    _check_one_device(model)
    training = [module for module in model.modules() if module.training]
    devices = [model.device] if getattr(model, "device", torch.device("cpu")).type == "cuda" else []
    try:
        for module in training:
            module.training = False
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            _run_as_written(model),
            unswitched(model),
        ):
            torch.manual_seed(0)
            yield
    finally:
        for module in training:
            module.training = True


def _check_one_device(model: nn.Module) -> None:
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        where = ", ".join("offloaded" if device == "meta" else device for device in devices)
        raise CaptureError(
            f"{type(core_model(model)).__name__} does not lie on one device ({where}), as device_map may "
            "leave it; load it whole on one, such as device_map = {'': 'cpu'}"
        )


@contextmanager
def _run_as_written(model: nn.Module) -> Iterator[None]:
    """Call modules that `torch.compile` wraps, or that were compiled in place, as if they were not."""
    in_place = {m: call for m in model.modules() if (call := getattr(m, "_compiled_call_impl", None))}
    wrappers = {m: m.__dict__["forward"] for m in model.modules() if uncompiled(m) is not m}
    try:
        for module in in_place:
            module._compiled_call_impl = None
        for module in wrappers:  # whose own __setattr__ would reach the module inside
            module.__dict__["forward"] = uncompiled(module)
        yield
    finally:
        for module, call in in_place.items():
            module._compiled_call_impl = call
        for module, forward in wrappers.items():
            module.__dict__["forward"] = forward


def run_model(
    model: nn.Module, tensors: Mapping[str, Tensor], *, attentions: bool = False, keep_logits: bool = False
) -> Any:
    """Return the outputs of `model` for one batch.

    Parameters
    ----------
    model : model of transformers
    tensors : mapping of argument to Tensor
        Moved to the model's device; float tensors take its dtype.
    attentions : bool
        Ask for attentions, which some layers need before they return their weights.
    keep_logits : bool
        Ask a causal language model for the logits of every position, instead of the last alone.
    """
    core = core_model(model)
    accepted = accepted_arguments(model)
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    if attentions:
        options["output_attentions"] = True
    if "logits_to_keep" in accepted and not keep_logits:
        options["logits_to_keep"] = 1
    with given_length(tensors):
        return uncompiled(model)(**place(tensors, core.device, core.dtype), **options)


def place(tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Move tensors to `device`; float tensors take `dtype`.

    To a GPU they go from pinned memory, and nobody waits for them to arrive.
    """
    pinned = device.type == "cuda"
    if pinned:
        tensors = {k: v.pin_memory() if v.device.type == "cpu" else v for k, v in tensors.items()}
    return {
        k: v.to(device, dtype if v.is_floating_point() else v.dtype, non_blocking=pinned)
        for k, v in tensors.items()
    }


@contextmanager
def exclusive(model: nn.Module, configs: Sequence[Any] = ()) -> Iterator[None]:
    """Hold `model` frozen while no other thread captures it or a model that shares its config."""
    with config_locks([*configs, core_model(model).config]), frozen(model):
        yield


@contextmanager
def watched(
    plan: CapturePlan,
    receive: Receiver,
    expected: int | None,
    replay: Replay | None = None,
    *,
    whole: bool = True,
    scratch: Scratch | None = None,
) -> Iterator[None]:
    """Send each attention call of this thread to `receive`, and check on leaving that none was missed.

    Layers that attend in pieces send one call of all pieces; with `whole` off, each piece as it comes, so
    that `receive` may replace what it gives. With `scratch`, weights are good until `receive` returns.
    """
    seen = Counter[str]()
    pieces: dict[str, list[AttentionCall]] = {path: [] for path in plan.pieces if whole}

    def note(call: AttentionCall) -> Tensor | None:
        if call.path in pieces:
            pieces[call.path].append(call)
            return None
        seen[call.path] += 1
        return receive(call)

    def join(call: AttentionCall) -> None:
        seen[call.path] += 1
        receive(call)

    with ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        lent = None if pieces else scratch  # pieces are kept until all are there
        stack.enter_context(interface_capture(plan.modules("interface"), plan.configs, note, lent))
        stack.enter_context(hook_capture(plan.modules("hook"), note, replay))
        piecewise = {path: module for path, module in plan.modules().items() if path in pieces}
        stack.enter_context(joined_pieces(piecewise, pieces, join))
        yield
        for path in plan.pieces if not whole else ():
            seen[path] = called[path]  # more calls of its kernel than of the layer
        check_counts(plan, called, seen, expected)


def fold_batch(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    fold: BatchFold,
    *,
    verify: bool = False,
    keep_logits: bool = False,
    scratch: Scratch | None = None,
) -> Any:
    """Run one batch and fold its attention layer by layer.

    Parameters
    ----------
    model, plan, tensors
    fold : BatchFold
        Filled with the rollout of the batch.
    verify : bool
        Also compare attention × values with every layer's own output.
    keep_logits : bool
        See :func:`run_model`.
    scratch : Scratch, optional
        Where weights may lie that `fold` does not keep.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed or its weights are not what it used.
    """

    def receive(call: AttentionCall) -> None:
        check_rows(call, fold.valid)
        if verify:
            check_values(call, fold.valid)
        fold.fold(call.weights, sink=call.sink)

    expected = None if plan.narrowed else expected_calls(core_model(model))
    with exclusive(model, plan.configs), watched(plan, receive, expected, scratch=scratch):
        return run_model(model, tensors, attentions=plan.has_hooks, keep_logits=keep_logits)


def attend_batch(
    model: nn.Module,
    plan: CapturePlan,
    tensors: Mapping[str, Tensor],
    attend: Callable[[KernelCall], tuple[Tensor, Tensor | None]],
    *,
    keep_logits: bool = False,
) -> Any:
    """Run one batch with `attend` in the place of every layer's kernel, and check that none was missed.

    Parameters
    ----------
    model, plan, tensors
        All layers of `plan` are on the attention interface.
    attend : function of a KernelCall
        Returns what the kernel returns: output and weights.
    keep_logits : bool
        See :func:`run_model`.

    Returns
    -------
    The model's outputs

    Raises
    ------
    CaptureError
        When a layer was missed.
    """
    seen = Counter[str]()

    def counted(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        seen[call.path] += 1
        return attend(call)

    expected = None if plan.narrowed else expected_calls(core_model(model))
    with exclusive(model, plan.configs), ExitStack() as stack:
        called = stack.enter_context(counted_calls(plan.modules()))
        stack.enter_context(interface_capture(plan.modules("interface"), plan.configs, Replacing(counted)))
        outputs = run_model(model, tensors, keep_logits=keep_logits)
        check_counts(plan, called, seen, expected)
    return outputs


def active_plan(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], *, joined: bool = False
) -> CapturePlan:
    """Return `plan` without the layers that do not run for `tensors`.

    With `joined` they are an image with text that are read in one sequence.

    Raises
    ------
    CaptureError
        When the model cannot run, or what runs has no exact rollout; see
        :func:`audit.capture.attention.layers.narrow_plan`.
    """
    with counted_calls(plan.modules()) as called:
        _run_or_refuse(model, plan, tensors)
    found = narrow_plan(core_model(model), plan, list(called), joined=joined)
    if found.has_hooks:
        _run_or_refuse(model, plan, tensors, attentions=True)
    if joined or "input_ids" not in tensors:  # packed pictures, which may be cut into windows
        found = replace(found, pieces=_piecewise(model, found, tensors))
    return replace(found, alone=joined or _joins_probes(model, found, tensors))


def _run_or_refuse(
    model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor], *, attentions: bool = False
) -> None:
    try:
        with exclusive(model, plan.configs):
            run_model(model, tensors, attentions=attentions)
    except (ValueError, TypeError, AttributeError) as error:
        given, why = ", ".join(tensors), " ".join(str(error).split())
        asked = " when it is asked for its attentions" if attentions else ""
        name = type(core_model(model)).__name__
        raise CaptureError(f"{name} cannot run on {given}{asked}: {why[:160]}") from error


def _piecewise(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the layers that call their kernel more often than they are called."""
    seen = Counter[str]()

    def count(call: AttentionCall) -> None:
        seen[call.path] += 1

    with (
        exclusive(model, plan.configs),
        counted_calls(plan.modules()) as called,
        interface_capture(plan.modules("interface"), plan.configs, count),
    ):
        run_model(model, tensors, attentions=plan.has_hooks)
    return frozenset(path for path, times in seen.items() if times > called[path])


def _joins_probes(model: nn.Module, plan: CapturePlan, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether two probes give one long row of weights, as where images are packed into a sequence."""
    if all(len(t) == 1 for t in tensors.values()) and "pixel_values" not in tensors:
        return False
    sizes: list[int] = []

    def receive(call: AttentionCall) -> None:
        sizes.append(len(call.weights))

    doubled = {name: torch.cat([t, t]) for name, t in tensors.items()}
    try:
        with exclusive(model, plan.configs), watched(plan, receive, None):
            run_model(model, doubled, attentions=plan.has_hooks)
    except (ValueError, RuntimeError, CaptureError):
        return True  # what it cannot take together it takes alone, and is checked so
    return not sizes or sizes[0] != 2
