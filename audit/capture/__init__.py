"""Attention of a loaded checkpoint, captured exactly and folded into maps.

`capture` yields the maps and the prediction of each probe; `check_probes` and `check_determinism` refuse
beforehand what would fail later; `has_automatic_regions` tells whether a map has special positions;
`occlude` removes a region and watches the target logit; `fit_head_weights` fits one weight per head on
calibration probes.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from audit.capture.attributions.occlusion import Occlusion, occlude, occluded_scores
    from audit.capture.attributions.shuffling import cascade, shuffled
    from audit.capture.head_weights import HeadFit, fit_head_weights
    from audit.capture.inputs.windows import probe_windows
    from audit.capture.session import Opened, capture, check_determinism, check_probes, has_automatic_regions

__all__ = [
    "HeadFit",
    "Occlusion",
    "Opened",
    "capture",
    "cascade",
    "check_determinism",
    "check_probes",
    "fit_head_weights",
    "has_automatic_regions",
    "occlude",
    "occluded_scores",
    "probe_windows",
    "shuffled",
]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import: only when something is captured.
    if name in ("Occlusion", "occlude", "occluded_scores"):
        from audit.capture.attributions import occlusion as module
    elif name in ("cascade", "shuffled"):
        from audit.capture.attributions import shuffling as module  # type: ignore[no-redef]
    elif name in ("HeadFit", "fit_head_weights"):
        from audit.capture import head_weights as module  # type: ignore[no-redef]
    elif name == "probe_windows":
        from audit.capture.inputs import windows as module  # type: ignore[no-redef]
    elif name in __all__:
        from audit.capture import session as module  # type: ignore[no-redef]
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(module, name)
