"""Read an audit.toml, and say in one line what is wrong with it."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from audit.config.capture import CaptureSection, MethodSection
from audit.config.document import (
    ApprovalsSection,
    AuditConfig,
    FaithfulnessSection,
    ReportSection,
    ScheduleSection,
    StoreSection,
)
from audit.config.judging import GateSection, RuleSection, StatisticsSection
from audit.config.paths import resolve_paths
from audit.config.sources import CheckpointSection, DomainSection, ProbesSection, ReplicateSection
from audit.errors import ConfigError


def load_config(path: str | Path) -> AuditConfig:
    """Read an audit.toml and resolve its relative paths.

    Parameters
    ----------
    path : str or Path
        The file; paths inside it are relative to its folder.

    Returns
    -------
    AuditConfig

    Raises
    ------
    ConfigError
        When the file is missing, is not TOML, or does not fit; the message names the key, and the
        nearest valid one where a key is unknown.
    """
    path = Path(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; `audit init MODEL PROBES` writes one") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory; give the path of an audit.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not readable as TOML: {error}") from None
    return parse_config(data, base=path.parent, name=str(path))


def parse_config(data: dict[str, Any], *, base: Path = Path(), name: str = "configuration") -> AuditConfig:
    """Validate a configuration given as a mapping; see :func:`load_config`."""
    try:
        config = AuditConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{name}: {_first_problem(error)}") from None
    return resolve_paths(config, base)


def _first_problem(error: ValidationError) -> str:
    problems = error.errors()
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    where = ".".join(str(part) for part in problem["loc"])
    more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
    if problem["type"] == "extra_forbidden":
        return f'unknown key "{where}"{_nearest(problem["loc"])}{more}'
    if problem["type"] == "missing":
        return f'"{where}" is missing; add it{more}'
    message = problem["msg"].removeprefix("Value error, ").replace("\n", " ")
    return f"{where}: {message}{more}" if where else f"{message}{more}"


def _nearest(location: tuple[int | str, ...]) -> str:
    fields = list(_fields_at(location[:-1]))
    close = difflib.get_close_matches(str(location[-1]), fields, n=1, cutoff=0.5)
    if close:
        return f'; did you mean "{close[0]}"?'
    return f"; valid keys here are {', '.join(fields)}"


def _fields_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the field names of the section at `location`, found by walking the annotations."""
    sections: dict[str, type[BaseModel]] = {
        "store": StoreSection, "checkpoints": CheckpointSection, "replicates": ReplicateSection,
        "probes": ProbesSection, "domain": DomainSection, "method": MethodSection, "capture": CaptureSection,
        "statistics": StatisticsSection, "gate": GateSection, "schedule": ScheduleSection,
        "report": ReportSection, "approvals": ApprovalsSection, "faithfulness": FaithfulnessSection,
    }  # fmt: skip
    if not location:
        return list(AuditConfig.model_fields)
    if location[:2] == ("gate", "rules"):
        return list(RuleSection.model_fields)
    return list(sections[str(location[0])].model_fields)
