"""Attention of a loaded checkpoint, captured exactly and folded into maps.

`capture` yields a map and a prediction for each probe; `check_probes` and `check_determinism` refuse
beforehand what would fail later; `occlude` removes a region and watches the target logit.
"""

from audit.capture.occlusion import Occlusion, occlude
from audit.capture.session import capture, check_determinism, check_probes

__all__ = ["Occlusion", "capture", "check_determinism", "check_probes", "occlude"]
