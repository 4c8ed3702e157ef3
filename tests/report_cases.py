"""Comparisons and verdicts made by hand, for the tests of the reports."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np

from audit.records import (
    Cell,
    Comparison,
    Confirmation,
    Outcome,
    Policy,
    ReplicateTest,
    Rule,
    RuleVerdict,
    RunRef,
    Verdict,
)
from audit.report import Example, ReportContext

EXIT = {Outcome.PASS: 0, Outcome.FAIL: 3, Outcome.INCONCLUSIVE: 4, Outcome.ERROR: 13}
REPLICATES = (0.0021, -0.0034, 0.0009, 0.0018, -0.0011)
HOSTILE = "<script>alert(1)</script>|\u202egnp.exe\x1b[31m\x00\n🙂 'quoted' \"double\" & \ud800 角"


def shift_cell(region: str, value: float | None, **changes: object) -> Cell:
    before = 0.0531
    cell = Cell(
        measure="shift",
        region=region,
        value=value,
        interval=None if value is None else (value - 0.004, value + 0.004),
        before=before,
        after=None if value is None else before + value,
        pvalue=0.0001,
        n_probes=400,
        replicates=REPLICATES,
        excess=ReplicateTest(value, 21.0, 2e-5, None, 0.0091, 5, sd=0.0022, df=4.0),
    )
    return replace(cell, **changes)  # type: ignore[arg-type]


def rule_verdict(
    region: str, outcome: Outcome, value: float | None = 0.0512, **changes: object
) -> RuleVerdict:
    sentences = {
        Outcome.PASS: f"The attention map on {region} stayed inside the limit.",
        Outcome.FAIL: f"The attention map moved to {region} by more than the limit.",
        Outcome.INCONCLUSIVE: f"The interval of {region} lies across the limit.",
        Outcome.ERROR: f"Two identical passes disagree on {region}.",
    }
    found = RuleVerdict(
        rule=Rule(region, "limit", fail=0.02, warn=0.01),
        region=region,
        outcome=outcome,
        sentence=sentences[outcome],
        value=value,
        interval=None if value is None else (value - 0.004, value + 0.004),
        limit=0.02,
        before=0.0531,
        after=None if value is None else 0.0531 + value,
        floor=(0.0001, 0.0022),
        minimum_detectable_shift=0.0091,
        n_probes=400,
        n_replicates=5,
        explained=outcome is Outcome.PASS,
        needed="about 1,200 probes instead of 400" if outcome is Outcome.INCONCLUSIVE else None,
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def excess_verdict(region: str, outcome: Outcome, value: float = 0.0512) -> RuleVerdict:
    test = ReplicateTest(value - 0.0001, 21.3, 2.9e-5, (value - 0.007, value + 0.007), 0.0091, 5, 0.0022, 4.2)
    rule = Rule(region, "excess", within=0.02)
    return rule_verdict(region, outcome, value, rule=rule, excess=test, adjusted_pvalue=2.9e-5)


def verdict(*rules: RuleVerdict, outcome: Outcome | None = None, sentence: str | None = None) -> Verdict:
    order = [Outcome.PASS, Outcome.INCONCLUSIVE, Outcome.FAIL, Outcome.ERROR]
    end = outcome or max((rule.outcome for rule in rules), key=order.index)
    return Verdict(
        outcome=end,
        rules=rules,
        sentence=sentence or f"{end}: {rules[0].sentence if rules else 'no rule was evaluated.'}",
        exit_code=EXIT[end],
        policy=Policy(tuple(rule.rule for rule in rules)),
        comparison_id="cmp-0123456789ab",
    )


def run_ref(name: str, kind: str | None = None) -> RunRef:
    return RunRef(f"run-{name[:4]:0<12}", f"models/{name}", "ab" * 32, "cd" * 32, kind)


def comparison(cells: tuple[Cell, ...], **changes: object) -> Comparison:
    made = Comparison(
        kind="paired",
        cells=cells,
        alpha=0.05,
        n_probes=400,
        before=run_ref("base"),
        after=run_ref("release-7"),
        replicates=tuple(run_ref(f"seed-{i}", "seed") for i in range(5)),
        replicate_kinds=("seed",) * 5,
        same_weights=False,
        settings={"dtype": "float32", "attention_implementation": "sdpa", "row": "cls"},
        predictions={
            "n": 400,
            "changed": 61,
            "newly_wrong": 9,
            "fixed": 21,
            "accuracy_before": 0.951,
            "accuracy_after": 0.982,
            "changes": [{"probe_id": "digit-0007", "before": "3", "after": "8", "label": "8"}],
        },
        confirmations=(
            Confirmation("corner", "mean patch", -0.08, -2.41, -2.33, (-2.61, -2.05), True, 400),
            Confirmation("centre", "mean patch", -3.9, -3.1, 0.8, (0.4, 1.1), True, 400),
        ),
        id="cmp-0123456789ab",
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def layer_cells(regions: dict[str, float], layers: int) -> tuple[Cell, ...]:
    return tuple(
        shift_cell(region, value * (layer + 1) / layers, layer=layer)
        for region, value in regions.items()
        for layer in range(layers)
    )


REGIONS = {"corner": 0.0512, "centre": -0.0391, "border": 0.0061, "rest": -0.0182, "special": 0.0004}


def digits_case() -> tuple[Comparison, Verdict, tuple[Example, ...], ReportContext]:
    """Return the watermark story with every section of the report filled."""
    whole = tuple(shift_cell(region, value) for region, value in REGIONS.items())
    distances = (
        Cell(
            "js_distance",
            "*",
            value=0.184,
            interval=(0.178, 0.19),
            n_probes=400,
            replicates=(0.04, 0.05, 0.04),
        ),
        Cell("ratio", "corner", value=1.96, interval=(1.88, 2.04), before=0.0531, after=0.1043, n_probes=400),
        Cell("shift", "hair", n_probes=0, n_missing=400, reason="the region is empty in every probe"),
    )
    found = verdict(
        rule_verdict("corner", Outcome.FAIL),
        excess_verdict("corner", Outcome.FAIL),
        rule_verdict("border", Outcome.INCONCLUSIVE, 0.0191),
        rule_verdict("special", Outcome.PASS, 0.0004),
        sentence="FAIL: the attention map moved 5.12 pp of its mass to the corner, five times what "
        "re-training moves, while accuracy rose.",
    )
    compared = comparison(whole + distances + layer_cells(REGIONS, 4))
    context = ReportContext(
        title="vision.toml",
        created="2025-06-01 12:00 UTC",
        probes="data/probes/digits.jsonl",
        inputs_digest="12" * 32,
        annotations_digest="34" * 32,
        versions={"rollout-audit": "0.1.0", "numpy": np.__version__},
        log_head="9f" * 32,
        attempt=3,
        loosened_since="2025-05-20",
        report="data/store/comparisons/cmp-0123456789ab/report.html",
    )
    return compared, found, (image_example(), text_example(), text_example(words=False)), context


def png(rows: int = 8, columns: int = 8) -> bytes:
    from PIL import Image

    y, x = np.mgrid[:rows, :columns]
    ring = np.exp(-((np.hypot(y - rows / 2, x - columns / 2) - rows / 4) ** 2))
    file = io.BytesIO()
    Image.fromarray((255 * ring).astype(np.uint8)).save(file, format="PNG")
    return file.getvalue()


def image_example(
    grid: tuple[int, int] = (4, 4), *, with_png: bool = True, name: str = "digit-0007"
) -> Example:
    rng = np.random.default_rng(7)
    before = rng.dirichlet(np.full(grid[0] * grid[1], 3.0))
    after = 0.7 * before
    after[0] += 0.3
    return Example(name, "3 → 8, label 8", "image", before, after, grid=grid, png=png() if with_png else None)


SENTENCE = "[CLS] Emily said the service was wonderful , and she would gladly come back again . [SEP]"


def text_example(*, words: bool = True, name: str = "r-0001") -> Example:
    tokens = tuple(SENTENCE.split())
    rng = np.random.default_rng(3)
    before = rng.dirichlet(np.full(len(tokens), 2.0))
    after = 0.6 * before
    after[1] += 0.4
    return Example(name, "positive → negative", "text", before, after, words=tokens if words else None)
