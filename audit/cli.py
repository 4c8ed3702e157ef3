"""The command line: parse → pipeline → print → exit code; nothing else."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from audit._commands import register
from audit._output import Outputs, emit
from audit._terminal import note, progress_bars, say, show_remarks
from audit.errors import AuditError, ConfigError, ExitCode, StoreError

if TYPE_CHECKING:
    from audit.config import AuditConfig
    from audit.records import Verdict
    from audit.store import Store

app = typer.Typer(
    name="audit",
    help="Did this model's attention move to other parts of its input, and by more than re-training does?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Argument(metavar="[CONFIG]", help="An audit.toml.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Allow = Annotated[
    list[str] | None, typer.Option("--allow", help="'inconclusive' exits 0 instead of 4; recorded.")
]
Mismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Compare runs with different settings; never PASS.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write a self-contained HTML report.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Append a Markdown summary to this file.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")]
StoreUrl = Annotated[str | None, typer.Option("--store", help="The store; default data/store.")]
UsePrefect = Annotated[bool, typer.Option("--prefect", help="Run as a Prefect flow.")]

DEFAULT_CONFIG = Path("audit.toml")
DEFAULT_STORE = "data/store"


def main() -> None:
    """Run the command line and exit; the console script."""
    show_remarks()
    try:
        code = app(standalone_mode=False)
    except AuditError as error:
        note(f"audit: {error}")
        sys.exit(int(error.exit_code))
    except (KeyboardInterrupt, typer.Abort):
        _interrupted()
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except Exception as error:
        _usage_or_bug(error)
    if code == ExitCode.INTERRUPTED:  # what the parser makes of Ctrl-C
        _interrupted()
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted() -> None:
    note("audit: interrupted; run the same command again to resume")
    sys.exit(int(ExitCode.INTERRUPTED))


def _usage_or_bug(error: Exception) -> None:
    show = getattr(error, "show", None)
    if show is not None:  # a usage error of the parser
        show()
        sys.exit(getattr(error, "exit_code", int(ExitCode.USAGE)))
    note(traceback.format_exc())
    note("audit: this is a bug; please report it with the lines above")
    sys.exit(int(ExitCode.BUG))


def _show_version(wanted: bool) -> None:
    if wanted:
        from audit import __version__

        say(f"rollout-audit {__version__}")
        raise typer.Exit(0)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Take the options of the program itself."""


@app.command()
def run(
    config: ConfigPath = DEFAULT_CONFIG,
    prefect: UsePrefect = False,
    allow: Allow = None,
    allow_mismatch: Mismatch = False,
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Capture what is missing, compare, and judge: the CI gate in one command."""
    from audit.config import load_config
    from audit.pipeline import run_audit

    settings = load_config(config)
    permitted = _permitted(allow, allow_mismatch)
    with progress_bars() as progress:
        if prefect:
            verdict = _flow(config, permitted, progress)
        else:
            verdict = run_audit(settings, progress=progress, allow=permitted)
    _finish(_store(settings.store.url), verdict, settings, Outputs(html, markdown, junit, as_json))


@app.command()
def capture(
    config: ConfigPath = DEFAULT_CONFIG,
    role: Annotated[str | None, typer.Option(help="Only before, after or replicate-<i>.")] = None,
    as_json: Json = False,
) -> None:
    """Capture the runs of a configuration into its store, resuming unfinished ones."""
    from audit.config import load_config
    from audit.pipeline import capture_all, plan_audit

    settings = load_config(config)
    plans = [plan for plan in plan_audit(settings) if role in (None, plan.role.partition("@")[0])]
    if not plans:
        raise ConfigError(f"{config} has no checkpoint as {role!r}; use before, after or replicate-<i>")
    with progress_bars() as progress:
        runs = capture_all(plans, together=settings.capture.together, progress=progress)
    say(json.dumps(runs) if as_json else "\n".join(f"{name}\t{run_id}" for name, run_id in runs.items()))


@app.command()
def compare(
    before: Annotated[str, typer.Argument(help="Id of the run before.")],
    after: Annotated[str, typer.Argument(help="Id of the run after.")],
    replicate: Annotated[list[str] | None, typer.Option(help="Id of a replicate's run; repeatable.")] = None,
    store: StoreUrl = None,
    as_json: Json = False,
) -> None:
    """Compare two stored runs, without a policy."""
    from audit.pipeline import compare_stored, publish

    where = _existing(store)
    identifier = publish(where, compare_stored(where, before, after, replicate or ()), None)
    emit(where, identifier, None, None, Outputs(as_json=as_json))


@app.command()
def gate(
    target: Annotated[str, typer.Argument(metavar="[CONFIG|COMPARISON]")] = str(DEFAULT_CONFIG),
    store: StoreUrl = None,
    allow: Allow = None,
    allow_mismatch: Mismatch = False,
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Judge stored runs, or a stored comparison; needs neither torch nor the models."""
    from audit.config import load_config
    from audit.pipeline import gate_comparison, gate_runs

    permitted = _permitted(allow, allow_mismatch)
    if target.startswith("cmp-"):
        where, settings = _existing(store), None
        verdict = gate_comparison(where, target, allow=permitted)
    else:
        settings = _with_store(load_config(target), store)
        where = _store(settings.store.url)
        verdict = gate_runs(settings, allow=permitted)
    _finish(where, verdict, settings, Outputs(html, markdown, junit, as_json))


@app.command()
def floor(
    config: ConfigPath = DEFAULT_CONFIG,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("floor.json"),
    as_json: Json = False,
) -> None:
    """Freeze the baseline and the replicates' reliance into one small file."""
    from audit.config import load_config
    from audit.pipeline import freeze_config_floor

    path = freeze_config_floor(load_config(config), out)
    size = path.stat().st_size
    say(json.dumps({"floor": str(path), "bytes": size}) if as_json else f"{path} ({size / 1024:.0f} KiB)")


@app.command()
def report(
    comparison: Annotated[str, typer.Argument(help="Id of a stored comparison.")],
    config: Annotated[Path | None, typer.Option(help="Names the probe file for example maps.")] = None,
    store: StoreUrl = None,
    html: Html = None,
    markdown: Markdown = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Print a stored comparison again, or write it as HTML, Markdown or JUnit XML."""
    from audit.config import load_config
    from audit.pipeline import read_verdict, signers_of

    settings = load_config(config) if config is not None else None
    where = _existing(store or (settings.store.url if settings else None))
    verdict = read_verdict(where, comparison, signers=signers_of(settings))
    emit(where, comparison, verdict, settings, Outputs(html, markdown, junit, as_json))


@app.command()
def init(
    model: Annotated[str, typer.Argument(help="The checkpoint before: a directory or hub id.")],
    probes: Annotated[Path, typer.Argument(help="The probe set.")],
    after: Annotated[str | None, typer.Option(help="The checkpoint to judge.")] = None,
    replicates: Annotated[str | None, typer.Option(help="Path or glob of harmless re-trainings.")] = None,
    out: Annotated[Path, typer.Option(help="The configuration to write.")] = DEFAULT_CONFIG,
    force: Annotated[bool, typer.Option(help="Overwrite an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Look at a model and a probe set, and write an audit.toml that runs."""
    from audit.pipeline import write_initial_config

    found = write_initial_config(model, probes, out, after=after, replicates=replicates, force=force)
    say(json.dumps(found) if as_json else "\n".join(f"{key:<9} {value}" for key, value in found.items()))


@app.command()
def serve(
    config: Annotated[list[Path], typer.Argument(help="One or more audit.toml with a schedule.")],
) -> None:
    """Serve the schedules of one or more configurations through Prefect."""
    _need("prefect", "flows")
    from flows.serve import serve_audits

    serve_audits(config)


@app.command()
def dashboard(
    store: StoreUrl = None,
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 8501,
    config: Annotated[list[Path] | None, typer.Option(help="Configurations whose probes are shown.")] = None,
) -> None:
    """Open the dashboard on a store."""
    import dashboards

    _need("streamlit", "dashboard")
    page = Path(dashboards.__file__).with_name("app.py")
    folder = Path(store or DEFAULT_STORE).resolve()
    environment = {**os.environ, "ROLLOUT_AUDIT_STORE": str(folder)}
    if config:
        environment["ROLLOUT_AUDIT_CONFIGS"] = os.pathsep.join(str(path.resolve()) for path in config)
    command = [sys.executable, "-P", "-m", "streamlit", "run", str(page), f"--server.port={port}"]
    options = ["--server.address=127.0.0.1", "--browser.gatherUsageStats=false", "--server.headless=true"]
    _require_free(port)
    if not folder.is_dir():
        note(f"{folder} does not exist yet; the dashboard shows what audits write to it")
    note(f"dashboard: http://127.0.0.1:{port} (Ctrl-C ends it)")
    if os.name == "posix":  # the server takes this process's place, so that what ends the one ends the other
        os.execve(command[0], [*command, *options], environment)
    raise typer.Exit(subprocess.run([*command, *options], env=environment, check=False).returncode)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise ConfigError(
                f"port {port} is taken; end what listens there, or choose another --port"
            ) from None


@app.command()
def demo(
    root: Annotated[Path, typer.Option(help="Folder for the demo's data, models and store.")] = Path("data"),
    as_json: Json = False,
) -> None:
    """Train small models, plant shortcuts in them, and audit them: the whole product in three minutes."""
    _need("prefect", "flows")
    from flows.demo_flow import run_demo

    with progress_bars() as progress:
        summary = run_demo(root, progress=progress)
    say(json.dumps(summary.as_dict()) if as_json else summary.as_text())


register(app)


def _store(url: str | None) -> Store:
    from audit.store import Store

    return Store(url or DEFAULT_STORE)


def _existing(url: str | None) -> Store:
    """Return the store to look into; a store that was named must be there."""
    where = _store(url)
    if url is not None and not where.root.is_dir():
        raise StoreError(f"store {where.root} does not exist; mend --store, or capture something first")
    return where


def _with_store(config: AuditConfig, url: str | None) -> AuditConfig:
    """Return `config` with another store, for example one that was downloaded."""
    if url is None:
        return config
    return config.model_copy(update={"store": config.store.model_copy(update={"url": url})})


def _permitted(allow: list[str] | None, mismatch: bool) -> tuple[str, ...]:
    unknown = set(allow or ()) - {"inconclusive"}
    if unknown:
        raise typer.BadParameter(f"--allow takes 'inconclusive', got {sorted(unknown)[0]!r}")
    return (*(allow or ()), *(("mismatch",) if mismatch else ()))


def _flow(config: Path, allow: tuple[str, ...], progress: Any) -> Verdict:
    _need("prefect", "flows")
    from flows.audit_flow import run_flow

    return run_flow(config, allow=allow, progress=progress)


def _need(package: str, extra: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ConfigError(f"{package} is not installed; pip install 'rollout-audit[{extra}]'")


def _finish(store: Store, verdict: Verdict, config: AuditConfig | None, outputs: Outputs) -> None:
    emit(store, str(verdict.comparison_id), verdict, config, outputs)
    raise typer.Exit(verdict.exit_code)
