"""The nouns of the project as frozen records.

Only NumPy and the standard library are imported here, so that every other module may import this
one. Arrays inside records are never written to after construction.
"""

from audit.records.cells import Cell, Column, Effect, ReplicateTest, ShareTable
from audit.records.checkpoints import Checkpoint, CheckpointInfo
from audit.records.comparisons import STRONG_KINDS, Comparison, ReplicateKind, RunRef
from audit.records.digests import canonical_json, digest
from audit.records.evidence import Advantage, Confirmation, Faithfulness
from audit.records.inputs import Positions, Probe, ProbeSet, Region
from audit.records.maps import Captured, FloatArray, Map, Prediction, Reliance, Stream
from audit.records.runs import CaptureSettings, Method, RunSpec
from audit.records.verdicts import Outcome, Policy, Rule, RuleVerdict, Verdict, worst

__all__ = [
    "STRONG_KINDS",
    "Advantage",
    "CaptureSettings",
    "Captured",
    "Cell",
    "Checkpoint",
    "CheckpointInfo",
    "Column",
    "Comparison",
    "Confirmation",
    "Effect",
    "Faithfulness",
    "FloatArray",
    "Map",
    "Method",
    "Outcome",
    "Policy",
    "Positions",
    "Prediction",
    "Probe",
    "ProbeSet",
    "Region",
    "Reliance",
    "ReplicateKind",
    "ReplicateTest",
    "Rule",
    "RuleVerdict",
    "RunRef",
    "RunSpec",
    "ShareTable",
    "Stream",
    "Verdict",
    "canonical_json",
    "digest",
    "worst",
]
