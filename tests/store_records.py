"""Small runs and comparisons with every optional field in use, for the tests of the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from audit.records import (
    Captured,
    CaptureSettings,
    Cell,
    CheckpointInfo,
    Comparison,
    Confirmation,
    Map,
    Method,
    Outcome,
    Policy,
    Positions,
    Prediction,
    Region,
    Reliance,
    ReplicateTest,
    Rule,
    RuleVerdict,
    RunRef,
    RunSpec,
    Verdict,
)
from audit.store import RunWriter, Store

PROBE_IDS = ("007", "1e5", "r-3", "null", "é", "2024-01-01")


def make_spec(weights: str = "a", **changes: Any) -> RunSpec:
    """Return the spec of a small run; `weights` tells checkpoints apart."""
    checkpoint = CheckpointInfo("models/base", weights * 64, weights * 64, "c" * 64, labels=("neg", "pos"))
    spec = RunSpec(
        checkpoint=checkpoint,
        inputs_digest="1" * 64,
        annotations_digest="2" * 64,
        regions=(Region("names", "terms", {"terms": ["Ann", "Bo"]}), Region("rest", "rest")),
        target="label",
        targets_digest="3" * 64,
        method=Method(params={"residual": 0.5}),
        settings=CaptureSettings(shard_probes=2),
        versions={"audit": "0.1.0", "torch": "2.13.0"},
    )
    return replace(spec, **changes)


def text_positions(n: int) -> Positions:
    """Return n tokens with spans and parts; the first is special."""
    starts = np.arange(n, dtype=np.int32) * 3 - 3
    starts[0] = -1
    special = np.zeros(n, dtype=bool)
    special[0] = True
    return Positions(
        "token",
        special,
        starts=starts,
        ends=(starts + 2).astype(np.int32),
        parts=np.where(special, -1, 0).astype(np.int8),
        causal=True,
    )


def image_positions(rows: int, columns: int) -> Positions:
    """Return a grid of patches with boxes behind a CLS position."""
    cells = [
        (c / columns, r / rows, (c + 1) / columns, (r + 1) / rows)
        for r in range(rows)
        for c in range(columns)
    ]
    boxes = np.array([(0, 0, 0, 0), *cells], dtype=np.float32)
    special = np.arange(len(boxes)) == 0
    return Positions("patch", special, boxes=boxes, grid=(rows, columns))


def audio_positions(n: int) -> Positions:
    """Return n frames of 20 ms."""
    starts = np.arange(n, dtype=np.float32) * 0.02
    return Positions("frame", np.zeros(n, dtype=bool), times=np.stack([starts, starts + 0.02], axis=1))


def make_map(
    probe_id: str, positions: Positions, *, layers: int = 3, stream: Any = "input", seed: int = 0
) -> Map:
    """Return a map of random weights, float32, each row summing to 1."""
    random = np.random.default_rng([seed, *probe_id.encode()])
    rows = random.dirichlet(np.ones(len(positions)), size=layers + 1).astype(np.float32)
    diagnostics = {"entropy": float(random.random()), "sink": float(rows[0].max())}
    return Map(probe_id, rows[0], positions, stream, 0.75, rows[1:] if layers else None, diagnostics)


def make_captured(probe_id: str, *, layers: int = 3, seed: int = 0) -> Captured:
    """Return the capture of a text probe of 4 to 9 tokens."""
    item = make_map(probe_id, text_positions(4 + len(probe_id) % 6), layers=layers, seed=seed)
    logits = tuple(float(np.float32(x)) for x in np.random.default_rng(seed).normal(size=2))
    return Captured(
        (item,),
        Prediction(
            probe_id,
            logits,
            "pos",
            "neg",
            logits[0],
            "neg",
            len(item.weights),
            group="g",
            segments={"b": "1", "a": "é"},
        ),
    )


def measure(item: Map, regions: Sequence[str] = ("names", "rest")) -> list[Reliance]:
    """Return the reliance on tokens 1-2 and the others; nothing is named in probe "null"."""
    found = []
    for region in regions:
        if item.probe_id == "null" and region == "names":
            found.append(Reliance(item.probe_id, region, None, stream=item.stream, reason="no such word"))
            continue
        part = slice(1, 3) if region == "names" else slice(3, None)
        layers = None if item.layers is None else tuple(float(row[part].sum()) for row in item.layers)
        share = float(item.weights[part].sum())
        found.append(Reliance(item.probe_id, region, share, 0.25, item.stream, layers))
    return found


def write_shard(writer: RunWriter, index: int, *, layers: int = 3, seed: int = 0) -> None:
    """Write shard `index` of the six probes, two a shard."""
    captured = [make_captured(i, layers=layers, seed=seed) for i in PROBE_IDS[2 * index : 2 * index + 2]]
    writer.write_shard(index, captured, [r for c in captured for m in c.maps for r in measure(m)])


def write_run(store: Store, spec: RunSpec | None = None, *, layers: int = 3, seed: int = 0) -> str:
    """Publish a run of six probes in three shards and return its id."""
    writer = store.begin_run(spec or make_spec(), 3)
    for index in range(3):
        write_shard(writer, index, layers=layers, seed=seed)
    return str(writer.publish(counts={"truncated": 0}, diagnostics={"entropy": 0.5})["run_id"])


def make_comparison(
    before: str = "run-000000000001", after: str = "run-000000000002", **changes: Any
) -> Comparison:
    """Return a comparison that uses every kind of field."""
    test = ReplicateTest(0.02, 3.1, 0.01, (0.005, 0.03), 0.012, 5, sd=0.004, df=4.5)
    undefined = ReplicateTest(None, None, None, None, None, 1, reason="one replicate")
    cells = (
        Cell(
            "shift",
            "names",
            value=0.1,
            interval=(0.05, 0.2),
            replicates=(0.01, -0.02),
            excess=test,
            n_probes=6,
        ),
        Cell("shift", "rest", layer=2, segment="language=en", excess=undefined, reason="no probes"),
        Cell("js_distance", "*", value=1e-17, effect="data", n_clusters=3, pvalue=1.0),
    )
    comparison = Comparison(
        kind="paired",
        cells=cells,
        alpha=0.05,
        n_probes=6,
        before=RunRef(before, "models/base", "a" * 64, "a" * 64),
        after=RunRef(after, "models/new", "b" * 64, "b" * 64),
        replicates=(RunRef("run-000000000003", "models/seed-1", "d" * 64, "d" * 64, "seed"),),
        replicate_kinds=("seed",),
        same_weights=False,
        mismatches=("dtype",),
        settings={"resamples": 99, "seed": 0},
        predictions={"changed": ["1e5"], "accuracy": [0.5, None]},
        confirmations=(Confirmation("names", "mask", 0.1, 0.4, 0.3, (0.2, 0.4), True, 6),),
    )
    return replace(comparison, **changes)


def make_verdict(fail: float = 0.02) -> Verdict:
    """Return a FAIL of one rule under a policy of two."""
    comparison = make_comparison()
    limit = Rule("names", "limit", fail=fail)
    policy = Policy((limit, Rule("*", "excess", within="3 sd")), allow=("inconclusive",))
    rule = RuleVerdict(
        limit,
        "names",
        Outcome.FAIL,
        "the attention map moved to names by 0.10",
        interval=(0.05, 0.2),
        floor=(0.0, 0.01),
        excess=comparison.cells[0].excess,
        confirmation=comparison.confirmations[0],
    )
    return Verdict(Outcome.FAIL, (rule,), "names: FAIL", 3, policy)


def probe_columns() -> dict[str, list[Any]]:
    """Return the columns of a comparison's probes."""
    return {
        "probe_id": list(PROBE_IDS),
        "stream": ["input"] * 6,
        "region": ["names"] * 6,
        "before": [0.1, 0.2, 0.3, None, 0.5, 0.6],
        "shift": [0.0, 0.1, -0.2, None, 0.0, 0.1],
        "reason": [None, None, None, "no such word", None, None],
    }


def assert_same_map(found: Map, expected: Map) -> None:
    assert (found.probe_id, found.stream, found.share) == (expected.probe_id, expected.stream, expected.share)
    assert found.diagnostics == expected.diagnostics
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert found.weights.dtype == np.float32
    if expected.layers is None:
        assert found.layers is None
    else:
        np.testing.assert_array_equal(found.layers, expected.layers)
    assert_same_positions(found.positions, expected.positions)


def assert_same_positions(found: Positions, expected: Positions) -> None:
    for name, value in vars(expected).items():
        other = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert (other.dtype, other.shape) == (value.dtype, value.shape), name
            np.testing.assert_array_equal(other, value)
        else:
            assert other == value, name
