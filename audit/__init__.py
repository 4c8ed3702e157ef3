"""Tell whether a model's attention moved to other parts of its input, and by how much.

The public API is imported lazily: ``import audit`` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "audit.methods": (
        "attention_rollout",
        "per_head_rollout",
        "attention_flow",
        "gradient_rollout",
        "encoder_decoder_rollout",
        "encoder_decoder_relevance",
        "two_stream_relevance",
    ),
    "audit.metrics": (
        "js_distance",
        "js_divergence",
        "kl_divergence",
        "total_variation",
        "hellinger",
        "wasserstein",
        "earth_mover_distance",
        "energy_distance",
        "cosine_similarity",
        "spearman",
        "top_k_overlap",
        "center_of_mass_shift",
        "center_of_mass",
        "entropy",
        "sink_share",
        "depth_collapse",
        "spread_to_words",
        "resample_grid",
    ),
    "audit.alignment": ("align_maps",),
    "audit.agreement": ("pointing_game", "iou_at_area", "auprc"),
    "audit.compare": ("compare_maps",),
    "audit.calibrate": ("replicate_test",),
    "audit.gate": ("evaluate_gate",),
    "audit.config": ("load_config",),
    "audit.models": ("load_checkpoint",),
    "audit.probes": ("read_probes",),
    "audit.store": ("Store",),
    "audit.pipeline": (
        "compute_maps",
        "compute_maps_by_method",
        "compute_reliance",
        "capture_run",
        "compare_runs",
        "gate_runs",
        "run_audit",
        "approve",
        "plan_sensitivity",
        "freeze_floor",
        "read_floor",
        "train_replicates",
        "import_maps",
        "trends",
        "verify_store",
    ),
    "audit.pipeline.upkeep": ("tidy_store",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    try:
        home = _HOME_OF[name]
    except KeyError:
        raise AttributeError(f"module 'audit' has no attribute {name!r}") from None
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
