"""The nouns of the project as frozen records.

Only NumPy and the standard library are imported here, so that every other module may import this
one. Arrays inside records are never written to after construction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]
Stream = Literal["input", "source", "prefix", "image", "text"]
Effect = Literal["model", "data", "model_on_domain", "interaction"]
ReplicateKind = Literal["seed", "refresh", "release", "tail", "numeric"]

STRONG_KINDS: frozenset[str] = frozenset({"seed", "refresh", "release"})
"""Kinds of replicate that may decide an ``excess`` rule; the others understate the spread."""


def canonical_json(value: Any) -> str:
    """Return `value` as JSON that does not depend on key order, spacing or locale."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


# --- inputs -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """One input of the probe set.

    Attributes
    ----------
    id : str
        Unique within its probe set; the digest of the content where the file gives none.
    text, text_pair : str or None
        Content of a text probe. Character spans refer to these strings exactly as stored here.
    messages : sequence of {"role", "content"} or None
        A chat; rendered through the tokenizer's chat template.
    image : str or uint8 array (height, width) or (height, width, channel), or None
        Absolute path of an image file, or its pixels.
    audio : str or float32 array (samples,), or None
        Absolute path of a sound file, or its samples at `sampling_rate`.
    label : class name, class index, number, list of classes, or None
    group : str or None
        Template or cluster that the probe was made from; the unit of resampling when given.
    segments : mapping of str to str
        Free keys by which results are broken down.
    regions : mapping of name to annotation
        As read: character spans ``[[start, end], ...]``, ``{"text": spans, "text_pair": spans}``,
        ``{"box": [left, top, right, bottom]}`` in fractions of the stored image,
        ``{"mask": path}``, or time spans in seconds.
    """

    id: str
    text: str | None = None
    text_pair: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    image: str | NDArray[np.uint8] | None = None
    audio: str | NDArray[np.float32] | None = None
    sampling_rate: int | None = None
    label: Any = None
    group: str | None = None
    segments: Mapping[str, str] = field(default_factory=dict)
    regions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def modality(self) -> Literal["text", "image", "audio", "image+text"]:
        """Return which kind of processor the probe needs."""
        if self.image is not None:
            return "image" if self.text is None and self.messages is None else "image+text"
        return "text" if self.audio is None else "audio"


@dataclass(frozen=True)
class ProbeSet:
    """An ordered, fixed list of probes and its two digests."""

    probes: tuple[Probe, ...]
    inputs_digest: str
    annotations_digest: str
    source: str = ""

    def __len__(self) -> int:
        return len(self.probes)

    def __iter__(self) -> Iterator[Probe]:
        return iter(self.probes)

    @property
    def ids(self) -> tuple[str, ...]:
        """Return the probe ids in order."""
        return tuple(probe.id for probe in self.probes)


@dataclass(frozen=True)
class Positions:
    """Where each of n positions (tokens, patches, audio frames) lies in its probe.

    Attributes
    ----------
    kind : "token", "patch" or "frame"
    special : bool array (n,)
        Positions without content of the user: [CLS], [SEP], registers, sinks, template tokens.
    starts, ends : int32 array (n,) or None
        Character span [start, end) in the part's text, white space trimmed; -1 where there is none.
    parts : int8 array (n,) or None
        0 = ``text``, 1 = ``text_pair``, -1 = neither.
    boxes : float32 array (n, 4) or None
        Left, top, right, bottom as fractions of the *stored* image; zeros at special positions.
    grid : (rows, columns) or None
        Shape of the patch grid; patches run row by row.
    times : float32 array (n, 2) or None
        Start and end in seconds.
    causal : bool
        True when position i cannot attend beyond i, so that position 0 is the region ``first``.
    """

    kind: Literal["token", "patch", "frame"]
    special: NDArray[np.bool_]
    starts: NDArray[np.int32] | None = None
    ends: NDArray[np.int32] | None = None
    parts: NDArray[np.int8] | None = None
    boxes: NDArray[np.float32] | None = None
    grid: tuple[int, int] | None = None
    times: NDArray[np.float32] | None = None
    causal: bool = False

    def __len__(self) -> int:
        return len(self.special)

    @property
    def content(self) -> NDArray[np.bool_]:
        """Return which positions carry content: neither special nor position 0 of a causal model."""
        mask = ~self.special
        if self.causal and len(mask) > 1:
            mask = mask.copy()
            mask[0] = False
        return mask


@dataclass(frozen=True)
class Region:
    """A named set of positions, fixed before anything is looked at.

    `kind` is ``terms`` (list of words), ``pattern`` (regular expression), ``box``, ``annotated``
    (spans, boxes or masks of each probe), ``special``, ``first``, ``quantile`` (band of the relative
    position), ``grid`` (one cell of a rows × columns grid) or ``rest`` (content outside every other
    region). `params` holds the JSON-able parameters of the kind.
    """

    name: str
    kind: Literal["terms", "pattern", "box", "annotated", "special", "first", "quantile", "grid", "rest"]
    params: Mapping[str, Any] = field(default_factory=dict)


# --- what a capture yields --------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A distribution over the positions of one stream, read from the rollout matrix of one probe.

    Attributes
    ----------
    weights : float array (n,)
        Non-negative, sums to 1.
    share : float
        Part of the output row's whole mass that falls on this stream (1 for a single stream).
    layers : float array (layer, n) or None
        The same row of the cumulative R_l, each summing to 1.
    diagnostics : mapping
        ``entropy`` (divided by log n), ``sink`` (largest weight), ``depth_collapse``, ``empty_rows``.
    """

    probe_id: str
    weights: FloatArray
    positions: Positions
    stream: Stream = "input"
    share: float = 1.0
    layers: FloatArray | None = None
    diagnostics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reliance:
    """Share of one map's mass in one region.

    `share` is None, with a `reason`, where the region has no position in the probe. `size` is the
    share that a uniform map over the same positions would give; lift = share / size. `layers` holds
    the share for each cumulative R_l.
    """

    probe_id: str
    region: str
    share: float | None
    size: float | None = None
    stream: Stream = "input"
    layers: tuple[float, ...] | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Prediction:
    """What the checkpoint answered for one probe; all None for a backbone without a task head.

    `label`, `group` and `segments` repeat the probe's annotations, so that a comparison needs no probe
    file.
    """

    probe_id: str
    logits: tuple[float, ...] | None = None
    predicted: str | None = None
    target: str | None = None
    target_logit: float | None = None
    label: str | None = None
    tokens: int | None = None
    truncated: bool = False
    group: str | None = None
    segments: Mapping[str, str] = field(default_factory=dict)


# --- runs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointInfo:
    """Identity of a checkpoint, computable without loading its weights.

    `digest` is the SHA-256 over the per-file digests in `parts` (``weights``, ``config``,
    ``tokenizer``, ``adapter``); `weights_digest` covers weights and adapter alone.
    """

    ref: str
    digest: str
    weights_digest: str
    tokenizer_digest: str
    revision: str | None = None
    adapter: str | None = None
    architecture: str | None = None
    model_type: str | None = None
    labels: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    parameters: int = 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as loaded: the model in eval mode, its processor, and what it can do.

    `processor` is a tokenizer, an image processor, a feature extractor or a combined processor.
    `pooling` is the pooling that the checkpoint itself declares (``cls``, ``mean``, ``last``), else None.
    `task` is ``sequence-classification``, ``token-classification``, ``question-answering``,
    ``multiple-choice``, ``masked-lm``, ``causal-lm``, ``seq2seq-lm``, ``image-classification``,
    ``zero-shot-image-classification``, ``image-text-to-text``, ``ctc``, ``speech-seq2seq``,
    ``audio-classification``, ``other`` (a head of another kind) or ``backbone`` (no head).
    `base_has_head` is False when the head came with the adapter, so that the base has none.
    """

    info: CheckpointInfo
    model: Any
    processor: Any
    task: str
    has_head: bool
    pooling: str | None = None
    base_has_head: bool = True


@dataclass(frozen=True)
class Captured:
    """What a capture yields for one probe: a map for each stream, and the prediction."""

    maps: tuple[Map, ...]
    prediction: Prediction


@dataclass(frozen=True)
class Method:
    """How attention becomes a map: a name, its parameters, and the output row that is read."""

    name: str = "rollout"
    row: str = "auto"
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CaptureSettings:
    """Everything else about a capture that changes its numbers."""

    dtype: str = "float32"
    attention_implementation: str = "auto"
    device_type: str = "cpu"
    batch_tokens: int = 4096
    max_length: int | None = None
    truncate: bool = False
    truncation_side: str = "right"
    stride: int | None = None
    shard_probes: int = 500
    layer_maps: bool = True


@dataclass(frozen=True)
class RunSpec:
    """What a run is made of; its digest is the run's id."""

    checkpoint: CheckpointInfo
    inputs_digest: str
    annotations_digest: str
    regions: tuple[Region, ...]
    target: str
    targets_digest: str
    method: Method
    settings: CaptureSettings
    versions: Mapping[str, str]

    @property
    def regions_digest(self) -> str:
        """Return the digest of the region definitions."""
        return digest([[r.name, r.kind, dict(r.params)] for r in self.regions])

    @property
    def id(self) -> str:
        """Return ``run-`` and 12 hex digits."""
        content = {
            "checkpoint": self.checkpoint.digest,
            "inputs": self.inputs_digest,
            "annotations": self.annotations_digest,
            "regions": self.regions_digest,
            "targets": [self.target, self.targets_digest],
            "method": [self.method.name, self.method.row, dict(self.method.params)],
            "settings": vars(self.settings),
            "versions": dict(self.versions),
        }
        return f"run-{digest(content)[:12]}"


# --- statistics -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """What a column of numbers over probes measures. `layer` None is the whole stack."""

    region: str
    stream: str = "input"
    layer: int | None = None


@dataclass(frozen=True)
class ShareTable:
    """Reliance of one run as a matrix; NaN marks a missing region and never leaves memory.

    `values` is float64 (probe, column); a column is one region of one stream at one layer.
    """

    probe_ids: tuple[str, ...]
    columns: tuple[Column, ...]
    values: FloatArray


@dataclass(frozen=True)
class ReplicateTest:
    """Result of :func:`audit.replicate_test`; fields are None with a `reason` where undefined.

    `interval` covers the excess shift with level 1 - 2 alpha.
    """

    excess: float | None
    statistic: float | None
    pvalue: float | None
    interval: tuple[float, float] | None
    minimum_detectable_shift: float | None
    n_replicates: int
    sd: float | None = None
    df: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Cell:
    """Everything known about one measure of one column: the unit of every table and rule.

    Attributes
    ----------
    measure : str
        ``shift``, ``level``, ``ratio``, ``js_distance``, ``wasserstein``, ... Level is the mean
        share after, ratio the mean share after divided by the mean share before.
    region : str
        ``*`` for measures of the whole map.
    value : float or None
        Mean over probes; None with a `reason` when undefined.
    interval : (low, high) or None
        Level 1 - 2 alpha over probes, or over groups where probes have them.
    pvalue : float or None
        "Did the maps on these probes change?" Shown, never gates.
    adjusted_pvalue, wilcoxon_pvalue : float or None
        `pvalue` adjusted for looking at many cells (max-T, or Benjamini–Hochberg over segments and
        unpaired cells), and the signed-rank test's; both for exploring.
    replicates : tuple of float
        The measure for each replicate, in the comparison's order of replicates.
    probe_variance : float or None
        v of STATISTICS.md: variance over probes (clusters) of x_p - mean_i s_ip, divided by their
        number; on the log scale for distances.
    """

    measure: str
    region: str
    stream: str = "input"
    layer: int | None = None
    effect: Effect = "model"
    segment: str | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    before: float | None = None
    after: float | None = None
    sd: float | None = None
    effect_size: float | None = None
    size: float | None = None
    pvalue: float | None = None
    n_probes: int = 0
    n_missing: int = 0
    n_clusters: int | None = None
    replicates: tuple[float, ...] = ()
    probe_variance: float | None = None
    excess: ReplicateTest | None = None
    reason: str | None = None
    adjusted_pvalue: float | None = None
    wilcoxon_pvalue: float | None = None


@dataclass(frozen=True)
class RunRef:
    """One run as a comparison names it."""

    run_id: str
    checkpoint: str
    digest: str
    weights_digest: str
    kind: str | None = None


@dataclass(frozen=True)
class Confirmation:
    """Mean absolute change of the target logit when a region is occluded, on both checkpoints.

    `difference` is after - before of that, with its interval (1 - 2 alpha, over probes or
    groups); `confirmed` says whether it points the way of the shift and excludes zero.
    """

    region: str
    occlusion: str
    before: float
    after: float
    difference: float
    interval: tuple[float, float]
    confirmed: bool
    n_probes: int


@dataclass(frozen=True)
class Advantage:
    """Mean area under a perturbation curve, by the map's order and by random ones.

    `value` is how much better the map's order is, positive = better, with its interval (1 - 2 alpha, over
    probes or groups); see :mod:`audit.faithfulness`.
    """

    area: float
    random: float
    value: float
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Faithfulness:
    """How far one method's maps order positions by what a checkpoint's target logit depends on.

    Attributes
    ----------
    role : str
        ``before`` or ``after``.
    audited : bool
        Whether the runs were made with this method.
    faithful : bool
        Whether the order is shown to be better than random ones (deletion's interval lies above 0) and the
        map depends on the weights; else the `reason` says why not.
    comprehensiveness, sufficiency, random_comprehensiveness, random_sufficiency : tuple
        Means at 1, 5, 10, 20 and 50 % of the content positions, in units of the logit.
    spearman : mapping of method to float or None
        Mean rank correlation with the maps of other methods, over content.
    randomised : tuple of float or None
        The same with the maps of the audited method after the weights were shuffled, from the top down to
        all of them.
    sink, depth_collapse : float or None
        Means of the maps' diagnostics.
    """

    role: str
    method: str
    audited: bool
    faithful: bool
    reason: str | None = None
    deletion: Advantage | None = None
    insertion: Advantage | None = None
    comprehensiveness: tuple[float | None, ...] = ()
    sufficiency: tuple[float | None, ...] = ()
    random_comprehensiveness: tuple[float | None, ...] = ()
    random_sufficiency: tuple[float | None, ...] = ()
    spearman: Mapping[str, float | None] = field(default_factory=dict)
    randomised: tuple[float | None, ...] = ()
    sink: float | None = None
    depth_collapse: float | None = None
    n_probes: int = 0
    n_missing: int = 0


@dataclass(frozen=True)
class Comparison:
    """Two runs, their replicates, and every cell that was computed.

    `identical_maps` is True when no map differs at all; `same_weights` None when unknown (maps that
    were made elsewhere). `mismatches` lists the settings in which the runs differ. `nondeterministic`
    says what differed when the same probe went twice through one checkpoint, None when nothing did.
    `alignment` says how maps over different positions (tokenizer, patch grid) were brought to common
    ones, and why layers are not compared.
    """

    kind: Literal["paired", "unpaired"]
    cells: tuple[Cell, ...]
    alpha: float
    n_probes: int
    n_clusters: int | None = None
    before: RunRef | None = None
    after: RunRef | None = None
    replicates: tuple[RunRef, ...] = ()
    replicate_kinds: tuple[str, ...] = ()
    identical_maps: bool = False
    same_weights: bool | None = None
    mismatches: tuple[str, ...] = ()
    method: str = "rollout"
    settings: Mapping[str, Any] = field(default_factory=dict)
    predictions: Mapping[str, Any] = field(default_factory=dict)
    confirmations: tuple[Confirmation, ...] = ()
    faithfulness: tuple[Faithfulness, ...] = ()
    id: str | None = None
    nondeterministic: str | None = None
    alignment: tuple[str, ...] = ()

    def find(
        self,
        region: str,
        measure: str = "shift",
        *,
        stream: str | None = None,
        layer: int | None = None,
        effect: str | None = None,
        segment: str | None = None,
    ) -> Iterator[Cell]:
        """Yield the cells of `region` ("*" = every region) and `measure`."""
        for cell in self.cells:
            if (
                region in ("*", cell.region)
                and cell.measure == measure
                and (stream is None or cell.stream == stream)
                and cell.layer == layer
                and (effect is None or cell.effect == effect)
                and cell.segment == segment
            ):
                yield cell


# --- gate -------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """How a rule or a policy ends; worst first when compared by :func:`worst`."""

    PASS = "PASS"
    INCONCLUSIVE = "INCONCLUSIVE"
    FAIL = "FAIL"
    ERROR = "ERROR"


_SEVERITY = [Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL, Outcome.ERROR]


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome: ERROR > FAIL > INCONCLUSIVE > PASS."""
    return max(outcomes, key=_SEVERITY.index)


@dataclass(frozen=True)
class Rule:
    """One condition of a policy.

    ``limit`` rules judge against `fail` (and `warn`), ``excess`` rules against the noise floor:
    PASS needs the interval of the excess shift inside ±`within` (a number, or ``"3 sd"``).
    """

    region: str
    kind: Literal["limit", "excess"]
    measure: str = "shift"
    direction: Literal["increase", "decrease", "both"] = "both"
    fail: float | None = None
    warn: float | None = None
    within: float | str | None = None
    stream: str | None = None
    effect: Effect | None = None
    segment: str | None = None
    layer: int | None = None
    name: str | None = None

    @property
    def label(self) -> str:
        """Return the rule's name in tables and approvals."""
        return self.name or f"{self.kind} {self.measure} {self.region}"


@dataclass(frozen=True)
class Policy:
    """All rules, and the thresholds they share."""

    rules: tuple[Rule, ...]
    alpha: float = 0.05
    power: float = 0.8
    effect_floor: float = 0.01
    min_probes: int = 20
    min_clusters: int = 8
    min_replicates: int = 3
    allow: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return the SHA-256 that approvals and the log bind to."""
        return digest({**vars(self), "rules": [vars(rule) for rule in self.rules]})


@dataclass(frozen=True)
class RuleVerdict:
    """The outcome of one rule on one cell, with every number a reader needs to check it.

    `floor` is the mean and SD of the replicates' shifts; `explained` says whether re-training alone
    could explain the value (None = cannot be said), the same for every rule on one cell; `needed` is
    how many probes or replicates would settle an INCONCLUSIVE rule. `unproven` says why a shift proves no
    change of reliance: the method is not shown to be faithful on a checkpoint, and occlusion of the region
    has not confirmed it.
    """

    rule: Rule
    region: str
    outcome: Outcome
    sentence: str
    stream: str = "input"
    effect: str = "model"
    value: float | None = None
    interval: tuple[float, float] | None = None
    limit: float | None = None
    warned: bool = False
    before: float | None = None
    after: float | None = None
    floor: tuple[float, float] | None = None
    excess: ReplicateTest | None = None
    adjusted_pvalue: float | None = None
    minimum_detectable_shift: float | None = None
    n_probes: int = 0
    n_missing: int = 0
    n_clusters: int | None = None
    n_replicates: int = 0
    explained: bool | None = None
    needed: str | None = None
    reason: str | None = None
    confirmation: Confirmation | None = None
    unproven: str | None = None
    approved_by: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The worst outcome of a policy's rules, and all of them; `notes` tells what was not counted."""

    outcome: Outcome
    rules: tuple[RuleVerdict, ...]
    sentence: str
    exit_code: int
    policy: Policy
    comparison_id: str | None = None
    reason: str | None = None
    allowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def status(self) -> str:
        """Return the outcome as text."""
        return self.outcome.value
