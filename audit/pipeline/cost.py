"""What a capture will roughly cost, told before a long one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from audit._method_parameters import SAMPLES, STEPS
from audit.models import Estimate, estimate
from audit.pipeline.plan import RunPlan
from audit.pipeline.sources import load_probes
from audit.records import Method, Probe

LONG_MINUTES = 1.0
LARGE_GIGABYTES = 4.0
CHARACTERS_A_TOKEN = 4.0
PATCHES_AN_IMAGE = 197.0
FRAMES_A_SECOND = 50.0
ATTENTION_ALONE = 1.2
PASSES = {
    "gradient_rollout": 2.5,
    "norms": 2.0,
    "globenc": 2.0,
    "alti": 6.0,
    "input_x_gradient": 5.0,
    "grad_cam": 5.0,
    "lrp": 6.0,
}
"""Forward passes that a batch costs by method, as docs/methods.md states them; `passes` has the others."""


def capture_cost(plans: Sequence[RunPlan]) -> Estimate:
    """Return the memory of the largest checkpoint and the time of all plans together.

    Parameters
    ----------
    plans : sequence of RunPlan
        Those that are still to be captured.
    """
    costs = [_cost_of(plan) for plan in plans]
    return Estimate(max((one.gigabytes for one in costs), default=0.0), sum(one.minutes for one in costs))


def _cost_of(plan: RunPlan) -> Estimate:
    positions = fmean(rough_positions(probe) for probe in load_probes(plan.probes))
    return estimate(
        plan.spec.checkpoint,
        plan.n_probes,
        positions,
        dtype=plan.spec.settings.dtype,
        device_type=plan.spec.settings.device_type,
        passes=passes(plan.spec.method, positions),
    )


def passes(method: Method, positions: float) -> float:
    """Return about how many forward passes a batch of inputs of that length costs.

    >>> passes(Method("rollout"), 64.0), passes(Method("occlusion"), 64.0)
    (1.2, 64.0)
    >>> passes(Method("shap", params={"samples": 10}), 64.0)
    640.0
    """
    samples = float(method.params.get("samples") or SAMPLES.get(method.name, 1))
    if method.name in ("value_zeroing", "occlusion"):
        return positions
    if method.name == "integrated_gradients":
        return 3.0 * float(method.params.get("steps", STEPS))
    if method.name == "shap":
        return positions * samples
    if method.name == "lime":
        return samples
    return PASSES.get(method.name, ATTENTION_ALONE)


def cost_note(plans: Sequence[RunPlan]) -> str | None:
    """Return one line about a capture of over a minute or over 4 GB; None for a smaller one."""
    cost = capture_cost(plans)
    if cost.minutes <= LONG_MINUTES and cost.gigabytes <= LARGE_GIGABYTES:
        return None
    what = "1 run" if len(plans) == 1 else f"{len(plans)} runs"
    return (
        f"capturing {what} on {plans[0].spec.settings.device_type} takes about {cost.gigabytes:.1f} GB "
        f"of memory and {max(cost.minutes, 1):.0f} min (a rough estimate)"
    )


def rough_positions(probe: Probe) -> float:
    """Return about how many tokens, patches or frames a probe has, without a tokenizer.

    >>> rough_positions(Probe("p", text="It was a very good film."))
    8.0
    """
    texts = [probe.text or "", probe.text_pair or ""]
    texts += [str(message.get("content", "")) for message in probe.messages or ()]
    tokens = sum(map(len, texts)) / CHARACTERS_A_TOKEN + 2.0
    images = PATCHES_AN_IMAGE if probe.image is not None else 0.0
    if probe.audio is None or isinstance(probe.audio, str):
        frames = 0.0 if probe.audio is None else 10 * FRAMES_A_SECOND
    else:
        frames = len(probe.audio) / (probe.sampling_rate or 16_000) * FRAMES_A_SECOND
    return tokens + images + frames
