"""The joints of the product: plan, capture, compare, gate, confirm, approve.

Only these modules know models, probes, capture and store at once. Each step takes and returns ids,
paths and records, so that a loop (:func:`capture_run`), a Prefect flow and a dashboard can all drive it.
"""

from audit.pipeline.accepted import accepted_outcomes, read_verdict
from audit.pipeline.agreement import region_agreement
from audit.pipeline.approvals import approvals_of, read_approvals
from audit.pipeline.approve import approve
from audit.pipeline.capture import capture_all, capture_run, capture_shard, check_run, publish_run
from audit.pipeline.compare import compare_runs, compare_subset
from audit.pipeline.confirm import confirm_regions
from audit.pipeline.crossing import subset_crossing
from audit.pipeline.examples import example_maps
from audit.pipeline.floor import freeze_floor, read_floor
from audit.pipeline.gate import (
    compare_stored,
    freeze_config_floor,
    gate_comparison,
    gate_runs,
    run_audit,
)
from audit.pipeline.imported import import_for, import_maps
from audit.pipeline.initial import write_initial_config
from audit.pipeline.live import (
    LIVE_METHODS,
    capture_both,
    capture_one,
    head_count,
    load_run_checkpoint,
    memory_estimate,
    memory_obstacle,
    method_on_demand,
)
from audit.pipeline.maps import compute_maps, compute_maps_by_method, compute_reliance
from audit.pipeline.plan import Progress, RunPlan, plan_audit, plan_run
from audit.pipeline.planning import plan_sensitivity
from audit.pipeline.publish import publish, report_context, write_html
from audit.pipeline.replicate import train_replicates
from audit.pipeline.signatures import signers_of
from audit.pipeline.trend import trends
from audit.pipeline.verify import verify_store

__all__ = [
    "LIVE_METHODS",
    "Progress",
    "RunPlan",
    "accepted_outcomes",
    "approvals_of",
    "approve",
    "capture_all",
    "capture_both",
    "capture_one",
    "capture_run",
    "capture_shard",
    "check_run",
    "compare_runs",
    "compare_stored",
    "compare_subset",
    "compute_maps",
    "compute_maps_by_method",
    "compute_reliance",
    "confirm_regions",
    "example_maps",
    "freeze_config_floor",
    "freeze_floor",
    "gate_comparison",
    "gate_runs",
    "head_count",
    "import_for",
    "import_maps",
    "load_run_checkpoint",
    "memory_estimate",
    "memory_obstacle",
    "method_on_demand",
    "plan_audit",
    "plan_run",
    "plan_sensitivity",
    "publish",
    "publish_run",
    "read_approvals",
    "read_floor",
    "read_verdict",
    "region_agreement",
    "report_context",
    "run_audit",
    "signers_of",
    "subset_crossing",
    "train_replicates",
    "trends",
    "verify_store",
    "write_html",
    "write_initial_config",
]
