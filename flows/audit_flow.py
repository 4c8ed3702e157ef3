"""One audit as a Prefect flow: a task for each shard of probes, then one that publishes, then the gate.

Only paths and ids pass between tasks. Every task finds finished work in the store, so that a retried or
restarted flow goes on where it stopped.
"""

from __future__ import annotations

from pathlib import Path

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from audit.config import load_config
from audit.pipeline import Progress, RunPlan, capture_shard, check_run, gate_runs, plan_audit, publish_run
from audit.records import Verdict
from audit.report import to_markdown
from audit.store import Store
from flows.progress import PROGRESS


def _plan(config_path: str, role: str) -> RunPlan:
    return next(plan for plan in plan_audit(load_config(config_path)) if plan.role == role)


@task(name="check {role}", task_run_name="check {role}", cache_policy=NO_CACHE)
def check_task(config_path: str, role: str) -> None:
    """Refuse a run that would fail later: over-long probes, or two passes that disagree."""
    check_run(_plan(config_path, role))


@task(
    name="capture shard",
    task_run_name="capture {role} shard {index}",
    retries=2,
    retry_delay_seconds=5,
    cache_policy=NO_CACHE,
    retry_condition_fn=lambda _task, _run, state: not _is_user_error(state),
)
def capture_task(config_path: str, role: str, index: int) -> None:
    """Capture one shard of a run."""
    capture_shard(_plan(config_path, role), index, progress=PROGRESS.get())


@task(name="publish run", task_run_name="publish {role}", cache_policy=NO_CACHE)
def publish_task(config_path: str, role: str) -> str:
    """Write the manifest of a run whose shards are all there; return its id."""
    return publish_run(_plan(config_path, role))


@task(name="gate", cache_policy=NO_CACHE)
def gate_task(config_path: str, allow: tuple[str, ...]) -> Verdict:
    """Compare, judge and confirm; leave a Markdown artifact."""
    config = load_config(config_path)
    verdict = gate_runs(config, progress=PROGRESS.get(), allow=allow, confirm=config.report.confirm)
    identifier = str(verdict.comparison_id)
    create_markdown_artifact(
        key=f"verdict-{identifier}",
        markdown=to_markdown(Store(config.store.url).comparison(identifier), verdict),
        description=verdict.sentence,
    )
    return verdict


@flow(name="rollout-audit", flow_run_name="audit {config_path}", persist_result=False)
def audit_flow(config_path: str, allow: tuple[str, ...] = ()) -> Verdict:
    """Capture what is missing and judge, as the configuration says."""
    logger = get_run_logger()
    config = load_config(config_path)
    store = Store(config.store.url)
    for plan in plan_audit(config):
        if store.has_run(plan.run_id):
            logger.info("%s: reusing %s", plan.role, plan.run_id)
            continue
        finished = store.begin_run(plan.spec, len(plan.shards)).finished_shards()
        if not finished:
            check_task(config_path, plan.role)
        for index in range(len(plan.shards)):
            if index not in finished:
                capture_task(config_path, plan.role, index)
        logger.info("%s: captured %s", plan.role, publish_task(config_path, plan.role))
    return gate_task(config_path, allow)


def run_flow(config: Path, *, allow: tuple[str, ...] = (), progress: Progress | None = None) -> Verdict:
    """Run :func:`audit_flow` in this process and return its verdict.

    Parameters
    ----------
    config : Path
        An audit.toml.
    allow : tuple of str
    progress : callable, optional

    Returns
    -------
    Verdict

    Raises
    ------
    AuditError
        The flow's own error, unwrapped.
    """
    token = PROGRESS.set(progress)
    try:
        return audit_flow(str(config.resolve()), allow)
    finally:
        PROGRESS.reset(token)


def _is_user_error(state: object) -> bool:
    from prefect.client.schemas.objects import State

    from audit.errors import AuditError

    if not isinstance(state, State):
        return False
    error = state.result(raise_on_failure=False)
    return isinstance(error, AuditError)
