"""Capture a list of probes with a model that reads an image and a text in one sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from audit.capture.attention.check import same_tensors
from audit.capture.attention.layers import CapturePlan, plan_capture
from audit.capture.attention.mixing import check_mixing
from audit.capture.attention.passes import active_plan, exclusive, place, run_model
from audit.capture.engines.blocks import Block, find_blocks
from audit.capture.engines.maps import stream_map, undefined_map
from audit.capture.engines.settings import ATTRIBUTION, FLOW, GRADIENT, MEASURED, VALUE_AWARE, FoldSettings
from audit.capture.inputs.encoded import Encoded, core_model, patch_size
from audit.capture.inputs.pictures import Picture
from audit.capture.joined.attribution import JoinedAttribution, attribute_joined
from audit.capture.joined.contributions import ContributionFold, contribute_joined
from audit.capture.joined.cross_contributions import CrossedContributions, contribute_crossed
from audit.capture.joined.flow import JoinedFlow
from audit.capture.joined.fold import JoinedFold, fold_joined
from audit.capture.joined.front import KEYS, Front, check_entry, trace_front
from audit.capture.joined.gradient import JoinedRelevance, relevance_joined
from audit.capture.joined.origins import latent_count
from audit.capture.joined.question import JoinedQuestion
from audit.capture.joined.windowed import Slots, has_windows, measure_slots
from audit.capture.outputs.predictions import first_tensor, predictions
from audit.capture.outputs.rows import decide_row, row_weights
from audit.capture.outputs.targets import require_head
from audit.capture.pairs.methods import check_joined_settings, check_pair_settings
from audit.capture.pairs.parts import Part
from audit.errors import CaptureError, ProbeError
from audit.records import Captured, CaptureSettings, Checkpoint, Map, Method, Positions
from audit.records import Stream as StreamName

AnyFold = JoinedFold | JoinedRelevance | JoinedAttribution
GENERATES = ("image-text-to-text", "causal-lm")


@dataclass(frozen=True)
class JoinedSession:
    """A checkpoint that reads an image with text, and everything that is decided once for all probes.

    `blocks` and `parts` fill with what the first probe shows of the layers, where the method takes them
    apart. Models take one probe at a time, since images differ.
    """

    checkpoint: Checkpoint
    settings: CaptureSettings
    fold: FoldSettings
    row: str
    wanted: dict[str, Any]
    plan: CapturePlan
    blocks: dict[str, Block] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def takes_blocks_apart(self) -> bool:
        """Return whether the method looks at what each position adds."""
        return self.fold.method in VALUE_AWARE or self.fold.residual == MEASURED

    @property
    def windowed(self) -> bool:
        """Return whether layers attend within windows."""
        return has_windows(core_model(self.checkpoint.model).config)

    @property
    def reader(self) -> Checkpoint:
        """Return the checkpoint as what its head is: a language model where it generates text."""
        generates = self.checkpoint.task in GENERATES
        return replace(self.checkpoint, task="causal-lm") if generates else self.checkpoint


@dataclass(frozen=True)
class _Run:
    """One probe, run: its fold, the model's outputs, and the probe as the last stack sees it."""

    item: Encoded
    front: Front
    fold: AnyFold
    outputs: Any
    row_index: int


def open_joined(
    checkpoint: Checkpoint, item: Encoded, settings: CaptureSettings, method: Method, wanted: dict[str, Any]
) -> JoinedSession:
    """Decide what is the same for all probes, from the first.

    Raises
    ------
    ConfigError
        For methods and parameters that have no exact meaning for an image with text.
    CheckpointError
        When a logit is to be explained and the checkpoint has no head.
    CaptureError
        When the model cannot run or has layers whose attention cannot be seen.
    """
    fold = FoldSettings.from_method(method)
    check_pair_settings(fold, "joined")
    if fold.needs_target:
        require_head(checkpoint, fold.method)
    core = core_model(checkpoint.model)
    plan = active_plan(checkpoint.model, plan_capture(core), item.tensors, joined=True)
    check_joined_settings(fold, plan)
    session = JoinedSession(checkpoint, settings, fold, method.row, wanted, plan)
    crossed = next((layer.path for layer in plan.layers if layer.kind == "cross"), None)
    if session.windowed and crossed is not None:
        raise CaptureError(
            f"{type(core).__name__} attends within windows, and by cross-attention ({crossed}) to what they "
            "give; this is not supported, audit its backbone"
        )
    return session


def capture_joined(session: JoinedSession, window: Sequence[Encoded]) -> Iterator[Captured]:
    """Yield the maps of the streams ``image`` and ``text`` and the prediction of each probe, in order.

    Raises
    ------
    CaptureError
        When attention cannot be captured exactly; the message names the layer.
    ProbeError
        When a probe has no such row.
    """
    for item in window:
        yield _captured(session, _run(session, item))


def verify_joined(session: JoinedSession, window: Sequence[Encoded]) -> None:
    """Check on the first probe what :func:`audit.capture.single_session.verify` checks, in every stack.

    The image must also enter the last stack at its first block alone.

    Raises
    ------
    CaptureError
    """
    model, plan = session.checkpoint.model, session.plan
    if session.fold.method in ATTRIBUTION | {FLOW}:  # many passes twice would prove nothing more
        session = replace(session, fold=FoldSettings())
    first, again = _run(session, window[0], verify=True), _run(session, window[0])
    if not (
        same_tensors(first.fold.row(), again.fold.row())
        and same_tensors(first.fold.origins(), again.fold.origins())
    ):
        raise CaptureError("determinism: two identical passes disagree; no shift can be judged")
    for stack in plan.stacks:
        check_mixing(model, plan, first.item.tensors, first.front.sizes[stack][1], stack)
    check_entry(model, plan, first.item.tensors, _picture(first.item).name)
    with exclusive(model, plan.configs):
        plain = first_tensor(run_model(model, first.item.tensors, keep_logits=True))
    if not same_tensors(plain, first_tensor(first.outputs)):
        raise CaptureError(f"{type(core_model(model)).__name__}: capturing changes the model's own output")


def _run(session: JoinedSession, item: Encoded, *, verify: bool = False) -> _Run:
    model, plan = session.checkpoint.model, session.plan
    item, row = with_answer(session.checkpoint, item, session.row)
    front = trace_front(model, plan, item.tensors, _picture(item).name)
    slots = measure_slots(model, plan, item.tensors) if session.windowed else {}
    whole = replace(item, positions=_sequence(front, plan.stacks[-1], item.positions))
    with exclusive(model, plan.configs):
        decided = decide_row(session.reader, row, whole)
    weights = row_weights(decided, whole, None)
    read = torch.from_numpy(weights)[None].to(core_model(model).device)
    fold, outputs = _pass(session, whole, front, read, slots, verify=verify)
    return _Run(whole, front, fold, outputs, int(weights.argmax()))


def _pass(
    session: JoinedSession, item: Encoded, front: Front, read: Tensor, slots: Slots, *, verify: bool
) -> tuple[AnyFold, Any]:
    """Run the method on one probe."""
    given = (session.plan, session.fold, front, read)
    if session.fold.method in ATTRIBUTION:
        return _attributed(session, item, front, read, slots, verify=verify)
    if session.fold.method == GRADIENT:
        relevance = JoinedRelevance(*given, verify=verify, slots=slots)
        return relevance, relevance_joined(session.reader, item, relevance, session.wanted)
    if KEYS in front.sizes and session.takes_blocks_apart:
        crossed = CrossedContributions(*given, verify=verify)
        return crossed, contribute_crossed(session.checkpoint.model, item.tensors, crossed, session.parts)
    if session.takes_blocks_apart:
        parts = ContributionFold(*given, verify=verify, slots=slots)
        blocks = _find_blocks(session, item, slots)
        return parts, contribute_joined(session.checkpoint.model, item.tensors, parts, blocks)
    through = session.fold.method == FLOW and len(session.plan.stacks) > 1 and KEYS not in front.sizes
    fold = (JoinedFlow if through else JoinedFold)(*given, verify=verify, slots=slots)
    return fold, fold_joined(session.checkpoint.model, item.tensors, fold)


def _find_blocks(session: JoinedSession, item: Encoded, slots: Slots) -> dict[str, Block]:
    """Return the block of each layer, found in the first probe; value zeroing needs none."""
    if not session.blocks and session.fold.method != "value_zeroing":
        model = session.checkpoint.model
        with exclusive(model, session.plan.configs):
            found = find_blocks(core_model(model), session.plan, item.tensors, keep_logits=True, slots=slots)
        session.blocks.update(found)
    return session.blocks


def _attributed(
    session: JoinedSession, item: Encoded, front: Front, read: Tensor, slots: Slots, *, verify: bool
) -> tuple[JoinedAttribution, Any]:
    """Attribute the target logit of one probe; its rollout is passed for the checks alone."""
    inner = JoinedFold(session.plan, FoldSettings(), front, read, verify=verify, slots=slots)
    outputs = fold_joined(session.checkpoint.model, item.tensors, inner)
    _, special = _boxes(session, item, front)
    removable = ~special & np.isin(np.arange(len(special)), front.pixels)
    asked = JoinedQuestion(session.reader, item, front, read, removable, _picture(item))
    return attribute_joined(asked, session.fold, inner, outputs, session.wanted), outputs


def _picture(item: Encoded) -> Picture:
    if item.picture is None:
        raise CaptureError(f"probe {item.probe.id} has no image with its text; split the probe set")
    return item.picture


def with_answer(checkpoint: Checkpoint, item: Encoded, row: str) -> tuple[Encoded, str]:
    """Return a probe with the first tokens of the answer to it, without sampling, and the row to read.

    Parameters
    ----------
    checkpoint : Checkpoint
    item : Encoded
    row : str
        ``decoder:<i>`` is the row that predicts generated token i: the last of the prompt and i tokens of
        the answer. Other rows stay, and generate nothing.

    Raises
    ------
    ProbeError
        When the answer ends before token i.
    """
    match = re.fullmatch(r"decoder:(\d+)", row)
    if match is None or checkpoint.task not in GENERATES:
        return item, row
    steps, core = int(match[1]), core_model(checkpoint.model)
    if steps == 0:
        return item, "last"
    with exclusive(checkpoint.model):
        given = place(item.tensors, core.device, core.dtype)
        ids = core.generate(**given, max_new_tokens=steps, do_sample=False, num_beams=1).cpu()
    before = item.tensors["input_ids"].shape[1]
    answer = ids[:, before:] if torch.equal(ids[:, :before], item.tensors["input_ids"]) else ids
    if answer.shape[1] < steps:
        raise ProbeError(
            f"probe {item.probe.id}: the checkpoint generates {answer.shape[1]} tokens, none is row {row!r}; "
            "mend [method] row or remove the probe"
        )
    return replace(
        item, tensors=_longer(item.tensors, answer), positions=_padded(item.positions, steps)
    ), "last"


def _longer(tensors: Mapping[str, Tensor], answer: Tensor) -> dict[str, Tensor]:
    """Append tokens of the answer; they are attended to and belong to no image."""
    shape, found = tensors["input_ids"].shape, dict(tensors)
    for name, tensor in tensors.items():
        if tensor.shape == shape:
            more = torch.ones_like(answer) if name == "attention_mask" else torch.zeros_like(answer)
            found[name] = torch.cat([tensor, (answer if name == "input_ids" else more).to(tensor)], dim=1)
    return found


def _padded(positions: Positions, more: int) -> Positions:
    index = np.concatenate([np.arange(len(positions)), np.full(more, -1)])
    return taken_positions(positions, index)


def _sequence(front: Front, stack: str, text: Positions) -> Positions:
    """Return the positions of the last stack: those of the text where its tokens are, special elsewhere."""
    sequences, length = front.sizes[stack]
    if sequences != 1:
        raise CaptureError(f"{stack} runs {sequences} sequences for one probe; this is not supported")
    if not len(front.words):
        return Positions("patch", np.zeros(length, np.bool_))
    index = np.full(length, -1)
    known = front.words >= 0
    index[front.words[known]] = np.flatnonzero(known)
    return taken_positions(text, index)


def taken_positions(positions: Positions, index: NDArray[np.int64]) -> Positions:
    """Return positions in another order; a special one without place where the index is negative."""
    missing = index < 0

    def take(values: Any, fill: float) -> Any:
        if values is None:
            return None
        taken = values[np.where(missing, 0, index)].copy()
        taken[missing] = fill
        return taken

    return Positions(
        kind=positions.kind,
        special=take(positions.special, True),
        starts=take(positions.starts, -1),
        ends=take(positions.ends, -1),
        parts=take(positions.parts, -1),
        boxes=take(positions.boxes, 0),
    )


def _captured(session: JoinedSession, run: _Run) -> Captured:
    fold = run.fold
    rows, is_image = torch.stack([*fold.rows(), fold.row()]), (fold.origins().sum(dim=1) > 0).cpu().numpy()
    index, wanted = torch.tensor([run.row_index]), {**session.wanted, **fold.targets}
    prediction = predictions(session.reader, [run.item], run.outputs, wanted, index)[0]
    image, order = _image_positions(session, run)
    seen, words = fold.image(rows).cpu().numpy()[:, order], rows.cpu().numpy()[:, ~is_image]
    if isinstance(fold, JoinedRelevance) and fold.apart:  # two relevances without a common scale
        seen, words = (part / max(float(part.sum()), np.finfo(np.float64).tiny) for part in (seen, words))
    elif session.fold.needs_target:  # relevance has no sum of its own
        total = max(float(seen.sum() + words.sum()), np.finfo(np.float64).tiny)
        seen, words = seen / total, words / total
    text = taken_positions(run.item.positions, np.flatnonzero(~is_image))
    text = replace(text, causal=fold.causal and not is_image[0])
    parts: list[tuple[StreamName, NDArray[np.float64], Positions]] = [
        ("image", seen, image),
        ("text", words, text),
    ]
    if is_image.all():
        parts = [("input", seen, image)]
    maps = tuple(_map(session, run, *part) for part in parts)
    return Captured(maps, prediction)


def _map(
    session: JoinedSession, run: _Run, stream: StreamName, rows: NDArray[np.float64], positions: Positions
) -> Map:
    extra = {**({} if stream == "text" else _conventions(session, run)), **run.fold.diagnostics()}
    if not rows[-1].sum() > 0:  # nothing speaks for the target, or nothing is drawn from this stream
        return replace(undefined_map(run.item, positions, extra), stream=stream, share=0.0)
    layers = rows[:-1]
    whole = session.settings.layer_maps and len(layers) and bool((layers.sum(axis=1) > 0).all())
    return stream_map(run.item, rows[-1], layers if whole else None, positions, extra, stream=stream)


def _conventions(session: JoinedSession, run: _Run) -> dict[str, float]:
    """Return what of the image's map rests on a convention: how many patches and layers count alike."""
    merged = 1
    for sources in run.front.sources.values():  # merged patches may be merged again
        counts = [np.unique(fed[fed >= 0], return_counts=True)[1].max() for fed in sources.values()]
        merged *= int(max(counts, default=1))
    last = run.front.sources.get(KEYS) or run.front.sources.get(session.plan.stacks[-1], {})
    return {"merged_patches": float(merged), "tower_layers": float(max(len(last), 1))}


def _image_positions(session: JoinedSession, run: _Run) -> tuple[Positions, NDArray[np.int64]]:
    """Return the image's positions, special ones first, patches row by row, and their order in the stack."""
    boxes, special = _boxes(session, run.item, run.front)
    tile = np.arange(len(boxes)) // run.front.sizes[session.plan.stacks[0]][1]
    fine = np.rint(boxes * 1e3)
    order = np.lexsort((fine[:, 0], fine[:, 1], tile, ~special))
    if len(session.plan.stacks) == 1:  # the text is there, too
        order = order[np.isin(order, np.unique(run.front.pixels[run.front.pixels >= 0]))]
    found = Positions(
        kind="patch", special=special[order], boxes=boxes[order], grid=_grid(boxes[order], special[order])
    )
    return found, order


def _boxes(
    session: JoinedSession, item: Encoded, front: Front
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the box of each image position in the order of the tower, and which have none."""
    sequences, length = front.sizes[session.plan.stacks[0]]
    patch = patch_size(core_model(session.checkpoint.model).config)
    boxes = _picture(item).boxes(front.pixels, sequences * length + latent_count(front), patch)
    special = (boxes[:, 2] <= boxes[:, 0]) | (boxes[:, 3] <= boxes[:, 1])
    boxes[special] = 0
    return boxes, special


def _grid(boxes: NDArray[np.float32], special: NDArray[np.bool_]) -> tuple[int, int] | None:
    """Return rows and columns of patches that tile one rectangle row by row, None where they do not."""
    content = np.rint(boxes[~special] * 1e3)
    tops = len(np.unique(content[:, 1]))
    if tops == 0 or len(content) % tops:
        return None
    table = content.reshape(tops, -1, 4)
    alike = np.ptp(table[:, :, 1], axis=1).max() == 0 and np.ptp(table[:, :, 0], axis=0).max() == 0
    return (tops, table.shape[1]) if alike else None
