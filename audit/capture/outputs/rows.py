"""Which row of the rollout matrix is read, as weights over the rows of each probe."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attention.threads import own_thread
from audit.capture.inputs.encoded import Encoded, accepted_arguments, core_model
from audit.capture.outputs.spans import Span, annotated_rows, labelled_spans
from audit.errors import CaptureError, ConfigError, ProbeError
from audit.records import Checkpoint

Group = tuple[int, int | None]
"""Rows [start, stop) that are read as one average; a negative or None stop counts from the end."""

ENDS = {"start": (1.0, 0.0), "end": (0.0, 1.0), "start+end": (0.5, 0.5)}
"""Rows of a question's answer: how much its first and its last position count."""

_FIXED: dict[str, tuple[Group, ...]] = {"cls": ((0, 1),), "mean": ((0, None),), "last": ((-1, None),)}


@dataclass(frozen=True)
class OutputRow:
    """A decided output row: groups of rows, each averaged, then averaged over the groups.

    `kind` is ``groups``, ``mask``, ``span``, ``region``, ``ends`` or ``labelled``; `name` is what the user
    reads.
    """

    name: str
    kind: str = "groups"
    groups: tuple[Group, ...] = ()
    span: tuple[int, int] | None = None


def parse_row(row: str) -> OutputRow | None:
    """Read an explicit output row; None for ``auto``.

    Parameters
    ----------
    row : str
        ``auto``, ``cls``, ``mean``, ``last``, ``mask``, ``token:<i>``, ``span:<start>-<end>`` in
        characters of the text, ``start``, ``end`` or ``start+end`` of an answer, ``labelled`` (the spans
        annotated under the name of a class), or the name of an annotated region of the probes.

    Raises
    ------
    ConfigError

    Examples
    --------
    >>> parse_row("token:3").groups
    ((3, 4),)
    """
    if row == "auto":
        return None
    if row in _FIXED:
        return OutputRow(row, groups=_FIXED[row])
    if row in ("mask", "labelled"):
        return OutputRow(row, kind=row)
    if row in ENDS:
        return OutputRow(row, kind="ends")
    if match := re.fullmatch(r"token:(-?\d+)", row):
        index = int(match[1])
        return OutputRow(row, groups=((index, index + 1 or None),))
    if match := re.fullmatch(r"span:(\d+)-(\d+)", row):
        return OutputRow(row, kind="span", span=(int(match[1]), int(match[2])))
    if ":" in row or row in ("eot", ""):
        raise ConfigError(
            f"[method] row = {row!r} is unknown; use auto, cls, mean, last, mask, token:<i>, "
            "span:<start>-<end>, start, end, start+end, labelled "
            "or the name of an annotated region"
        )
    return OutputRow(row, kind="region")


def decide_row(checkpoint: Checkpoint, row: str, longest: Encoded) -> OutputRow:
    """Decide the output row of a checkpoint: what `row` says, or for ``auto`` what its head reads.

    Causal language models are read at the last position, masked ones at the mask, answers at their start
    and end. A backbone is read
    as it declares its pooling, else at CLS where it has one, else as the mean. For every other head
    the rows are measured: those last hidden states that have a gradient from the logits.

    Parameters
    ----------
    checkpoint : Checkpoint
    row : str
        See :func:`parse_row`.
    longest : Encoded
        The longest probe; one short probe cannot tell the first row from the last.

    Raises
    ------
    CaptureError
        When the head reads rows in a way that has no name.
    """
    explicit = parse_row(row)
    if explicit is not None:
        _check_kind(checkpoint, explicit)
        return explicit
    if checkpoint.task == "question-answering" and checkpoint.has_head:
        return OutputRow("start+end", kind="ends")
    if checkpoint.task == "masked-lm":
        return OutputRow("mask", kind="mask")
    if checkpoint.task == "causal-lm":
        return OutputRow("last", groups=_FIXED["last"])
    if checkpoint.task in ("token-classification", "question-answering", "ctc"):
        return OutputRow("mean", groups=_FIXED["mean"])
    if checkpoint.has_head:
        return _measured_row(checkpoint, longest)
    return _backbone_row(checkpoint, longest)


def _check_kind(checkpoint: Checkpoint, row: OutputRow) -> None:
    """Refuse rows that belong to another task."""
    task = {"ends": "question-answering", "labelled": "token-classification"}.get(row.kind)
    if task is not None and (checkpoint.task != task or not checkpoint.has_head):
        raise ConfigError(
            f"[method] row = {row.name!r} belongs to {task}, but {checkpoint.info.ref} is a checkpoint for "
            f"{checkpoint.task if checkpoint.has_head else 'no task'}; use auto"
        )


def _backbone_row(checkpoint: Checkpoint, longest: Encoded) -> OutputRow:
    name = checkpoint.pooling
    if name not in _FIXED:
        tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
        cls = getattr(tokenizer, "cls_token_id", None)
        ids = longest.tensors.get("input_ids")
        has_cls = (
            bool(longest.positions.special[0]) if ids is None else cls is not None and int(ids[0, 0]) == cls
        )
        name = "cls" if has_cls else "mean"
    return OutputRow(str(name), groups=_FIXED[str(name)])


def _measured_row(checkpoint: Checkpoint, longest: Encoded) -> OutputRow:
    gradient = head_gradient(checkpoint, longest)
    n = len(longest)
    if gradient is None or gradient.shape[0] != n:
        raise CaptureError(
            f"{type(core_model(checkpoint.model)).__name__}: cannot tell which row its head reads; "
            "set [method] row"
        )
    if not np.isfinite(gradient).all():
        raise CaptureError(
            f"probe {longest.probe.id}: the checkpoint's output is NaN or infinite; its weights are damaged, "
            "or its dtype overflows: load it in float32"
        )
    groups = _groups(gradient)
    if not groups or len(groups) > 3:
        raise CaptureError(
            f"{type(core_model(checkpoint.model)).__name__}: its head reads {len(groups)} groups of rows; "
            "set [method] row to cls, mean, last or token:<i>"
        )
    ends = tuple(_from_end(start, stop, n) for start, stop in groups)
    name = next((name for name, fixed in _FIXED.items() if fixed == ends), None)
    return OutputRow(name or "+".join(f"rows {a}:{'' if b is None else b}" for a, b in ends), groups=ends)


def _from_end(start: int, stop: int, n: int) -> Group:
    if stop == n:
        return (start if stop - start > 1 or n == 1 else -1), None
    near_front = stop - start <= n // 2
    return (start, stop) if near_front else (start, stop - n)


def _groups(gradient: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Split rows with a gradient into runs of equal gradients."""
    scale = np.abs(gradient).max() or 1.0
    groups: list[tuple[int, int]] = []
    for i, row in enumerate(gradient):
        if np.abs(row).max() <= 1e-9 * scale:
            continue
        same = (
            groups and groups[-1][1] == i and np.allclose(row, gradient[i - 1], rtol=1e-3, atol=1e-6 * scale)
        )
        if same:
            groups[-1] = (groups[-1][0], i + 1)
        else:
            groups.append((i, i + 1))
    return groups


def head_gradient(checkpoint: Checkpoint, encoded: Encoded) -> NDArray[np.float64] | None:
    """Return the gradient of the logits with respect to the last hidden states: (position, dim).

    None when the model has no separate backbone or its logits do not depend on the states. The logits
    are weighted differently before they are added, so that they cannot cancel.
    """
    model = core_model(checkpoint.model)
    base = model.base_model
    if base is model:
        return None
    kept: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output.last_hidden_state
        kept.append(state)

    handles = [base.register_forward_hook(own_thread(keep)), *_gradient_leaf(base)]
    try:
        with torch.enable_grad():
            tensors = {k: _to(v, model) for k, v in encoded.tensors.items()}
            extra = {"use_cache": False} if "use_cache" in accepted_arguments(model) else {}
            logits = model(**tensors, **extra).logits.flatten().float()
            total = (logits * torch.linspace(1.0, 2.0, len(logits), device=logits.device)).sum()
            (gradient,) = torch.autograd.grad(total, kept[0], allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return None if gradient is None else gradient[0].double().cpu().numpy()


def _gradient_leaf(base: Any) -> list[Any]:
    """Make the first float tensor of the forward pass need a gradient, frozen parameters or not."""
    done: list[bool] = []

    def mark(_module: Any, _args: Any, output: Any) -> Any:
        if done or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        done.append(True)
        return output if output.requires_grad else output.detach().requires_grad_()

    leaves = [module for module in base.modules() if not any(True for _ in module.children())]
    return [module.register_forward_hook(own_thread(mark)) for module in leaves]


def _to(tensor: Tensor, model: Any) -> Tensor:
    return tensor.to(model.device, model.dtype) if tensor.is_floating_point() else tensor.to(model.device)


def row_weights(
    row: OutputRow,
    encoded: Encoded,
    mask_id: int | None,
    *,
    ends: Span | None = None,
    names: Sequence[str] = (),
) -> NDArray[np.float32]:
    """Return the weights of one probe's rows.

    Parameters
    ----------
    row : OutputRow
    encoded : Encoded
    mask_id : int or None
        The tokenizer's mask token.
    ends : (first, last), optional
        Positions of the probe's answer.
    names : sequence of str
        Class names of the checkpoint, for labelled spans.

    Returns
    -------
    float32 array (n,)
        Non-negative, sums to 1.

    Raises
    ------
    ProbeError
        When the probe has no such row.
    """
    weights = np.zeros(len(encoded), np.float64)
    if row.kind == "groups":
        for start, stop in row.groups:
            chosen = weights[start:stop]
            if len(chosen) == 0 or start < -len(weights):
                raise ProbeError(
                    f"probe {encoded.probe.id} has {len(weights)} positions, none is row {row.name!r}; "
                    "mend [method] row or remove the probe"
                )
            chosen += 1.0 / (len(chosen) * len(row.groups))
    elif row.kind == "mask":
        ids = encoded.tensors["input_ids"][0].numpy() if "input_ids" in encoded.tensors else np.zeros(0)
        weights[: len(ids)] = ids == mask_id
    elif row.kind == "ends" and ends is not None:
        for place, part in zip(ends, ENDS[row.name], strict=True):
            weights[place] += part
    elif row.kind == "labelled":
        for _, rows, _ in labelled_spans(encoded, names):
            weights += rows / rows.sum()
    else:
        weights += _region_rows(row, encoded)
    if not weights.sum() > 0:
        remedies = {
            "mask": "put the mask token into its text or set [method] row",
            "labelled": "annotate a region under the name of a class, or set [method] row",
        }
        remedy = remedies.get(row.kind, "mend [method] row")
        raise ProbeError(f"probe {encoded.probe.id} has no position for the row {row.name!r}; {remedy}")
    share: NDArray[np.float32] = (weights / weights.sum()).astype(np.float32)
    return share


def _region_rows(row: OutputRow, encoded: Encoded) -> NDArray[np.float64]:
    probe, name = encoded.probe, row.name
    if row.span is not None:
        probe = replace(probe, regions={name: [list(row.span)]})
    if name not in probe.regions:
        raise ProbeError(
            f"probe {probe.id} has no annotated region {name!r} to read as its row; mend [method] row"
        )
    return annotated_rows(name, encoded, probe.regions[name])
