"""audit.toml → :class:`AuditConfig`; strict: an unknown key is an error that names the nearest valid one.

Relative paths are resolved against the folder of the configuration file. Defaults are those of the
records, so that the file, the command line and the API share one spelling of each.
"""

from __future__ import annotations

import difflib
import glob
import math
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from audit._method_parameters import check_method
from audit.errors import ConfigError
from audit.records import CaptureSettings, Effect, Method, Policy, Region, ReplicateKind, Rule
from audit.regions import parse_regions
from audit.statistics.measures import SIMILARITIES, MapMeasure

RESAMPLES = 9999
DEFAULT_MEASURES: tuple[MapMeasure, ...] = ("js_distance", "wasserstein")
"""Measures of whole maps that every comparison tells."""

DEFAULT_STORE = "data/store"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StoreSection(_Section):
    """Where runs, comparisons, approvals and the log are kept."""

    url: str = DEFAULT_STORE


class CheckpointSection(_Section):
    """One checkpoint: a local directory or hub id, a stored run, or the approved baseline."""

    path: str | None = None
    run: str | None = None
    approved: bool = False
    revision: str | None = None
    adapter: str | None = None
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum([self.path is not None, self.run is not None, self.approved]) != 1:
            raise ValueError('give exactly one of path = "…", run = "run-…" or approved = true')
        return self


class ReplicateSection(_Section):
    """Harmless re-trainings: a path or glob of checkpoints, a stored run, or a frozen floor.

    With `command`, `audit replicate` trains the checkpoint of each of `seeds` (a number, or a list) at
    `path`, in which ``{seed}`` stands for the seed.
    """

    path: str | None = None
    run: str | None = None
    floor: str | None = None
    kind: ReplicateKind = "seed"
    adapter: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    command: str | None = None
    seeds: Annotated[int, Field(ge=1, le=1000)] | list[int] = 5

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.command is not None:
            for name, text in (("seed", self.command), ("out", self.command), ("seed", self.path or "")):
                if f"{{{name}}}" not in text:
                    where = "command" if text is self.command else "path"
                    raise ValueError(f"{where} needs {{{name}}} when replicates are trained by a command")
            if self.seeds == [] or (isinstance(self.seeds, list) and len(set(self.seeds)) < len(self.seeds)):
                raise ValueError("seeds must be a number of seeds, or a list of different ones")
        if sum(source is not None for source in (self.path, self.run, self.floor)) != 1:
            raise ValueError('give exactly one of path = "…", run = "run-…" or floor = "floor.json"')
        return self


class ProbesSection(_Section):
    """The probe set, and how its inputs are cut, as in production."""

    path: str
    columns: dict[str, str] = {}
    max_length: Annotated[int, Field(gt=0)] | None = None
    truncate: bool = False
    truncation_side: Literal["left", "right"] = "right"
    stride: Annotated[int, Field(gt=0)] | None = None
    target: str | int | list[str] | None = None

    @field_validator("target")
    @classmethod
    def _pair(cls, value: str | int | list[str] | None) -> str | int | list[str] | None:
        if isinstance(value, list) and (len(value) != 2 or value[0] == value[1]):
            raise ValueError(
                f"target is {value}; give one class, or two different ones whose logits are subtracted"
            )
        return value


class DomainSection(_Section):
    """The second probe set of a domain audit."""

    path: str
    columns: dict[str, str] = {}


class MethodSection(_Section):
    """How attention becomes a map."""

    name: str = Method.name
    row: str = Method.row
    head_fusion: Literal["mean", "max", "min", "weighted"] | None = None
    residual: float | list[float] | Literal["measured"] | None = None
    discard_ratio: Annotated[float, Field(ge=0, lt=1)] | None = None
    discard_below: Annotated[float, Field(ge=0)] | None = None
    top_k: Annotated[int, Field(gt=0)] | None = None
    start_layer: Annotated[int, Field(ge=0)] | None = None
    layer: int | None = None
    form: Literal["relevance", "product"] | None = None
    head: Annotated[int, Field(ge=0)] | None = None
    same_head: bool | None = None
    head_weights: list[list[float]] | None = None
    steps: Annotated[int, Field(ge=2)] | None = None
    samples: Annotated[int, Field(ge=2)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    max_seconds: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _known(self) -> Self:
        check_method(self.name, self._given())
        return self

    @field_validator("residual")
    @classmethod
    def _shares(cls, value: float | list[float] | str | None) -> float | list[float] | str | None:
        given = value if isinstance(value, list) else [value]
        wrong = [one for one in given if isinstance(one, float) and not 0 <= one <= 1]
        if wrong:
            raise ValueError(f"residual is {wrong[0]:g}; expected a share from 0 to 1, such as 0.5")
        return value

    def _given(self) -> dict[str, Any]:
        return self.model_dump(exclude={"name", "row"}, exclude_none=True)

    def record(self) -> Method:
        """Return the method with only the parameters that were given."""
        return Method(name=check_method(self.name, ()), row=self.row, params=self._given())


class CaptureSection(_Section):
    """How the forward passes are run."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float64"] | None = None
    attention_implementation: str | None = None
    batch_tokens: Annotated[int, Field(gt=0)] = CaptureSettings.batch_tokens
    shard_probes: Annotated[int, Field(gt=0)] = CaptureSettings.shard_probes
    layer_maps: bool = CaptureSettings.layer_maps
    together: bool = False


class StatisticsSection(_Section):
    """Level, power, resamples and seed of every statistic."""

    alpha: Annotated[float, Field(gt=0, lt=0.5)] = Policy.alpha
    power: Annotated[float, Field(gt=0, lt=1)] = Policy.power
    resamples: Annotated[int, Field(ge=99)] = RESAMPLES
    seed: int = 0
    measures: tuple[MapMeasure, ...] = DEFAULT_MEASURES


class RuleSection(_Section):
    """One condition of the policy."""

    region: str
    kind: Literal["limit", "excess"]
    measure: str = Rule.measure
    direction: Literal["increase", "decrease", "both"] = Rule.direction
    fail: float | None = None
    warn: float | None = None
    within: float | str | None = None
    stream: str | None = None
    effect: Effect | None = None
    segment: str | None = None
    layer: Annotated[int, Field(ge=0)] | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _limits(self) -> Self:
        if self.kind == "limit" and self.fail is None:
            raise ValueError("a limit rule needs fail = <number>")
        if self.kind == "limit" and self.within is not None:
            raise ValueError('within belongs to kind = "excess"; a limit rule has fail and warn')
        if self.kind == "excess" and self.within is None:
            raise ValueError('an excess rule needs within = <number> or "3 sd"')
        if self.kind == "excess" and (self.fail is not None or self.warn is not None):
            raise ValueError('fail and warn belong to kind = "limit"; an excess rule has within')
        if self.fail is not None:
            self._check_bounds(self.fail)
        return self

    def _check_bounds(self, fail: float) -> None:
        """Refuse limits that no value, or every value, could keep."""
        from audit.verdicts.rules import limit_bounds

        rule = Rule(**self.model_dump())
        if fail < 0 and self.measure not in SIMILARITIES and self.direction != "decrease":
            raise ValueError(f"fail is {fail:g}; give its size, {-fail:g}, and the side as direction")
        try:
            low, high = limit_bounds(rule, fail)
            warned = (low, high) if self.warn is None else limit_bounds(rule, self.warn)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if warned[0] < low or warned[1] > high:
            raise ValueError(
                f"warn = {self.warn:g} is looser than fail = {fail:g} and would never be seen; exchange them"
            )

    @field_validator("within")
    @classmethod
    def _within(cls, value: float | str | None) -> float | str | None:
        if isinstance(value, str):
            number, _, unit = value.strip().partition(" ")
            if unit.strip() != "sd" or not _is_positive(number):
                raise ValueError(f'within is {value!r}; expected a number or text like "3 sd"')
        elif value is not None and value <= 0:
            raise ValueError(f"within is {value}; expected a number above 0")
        return value


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


class GateSection(_Section):
    """The rules and the thresholds they share."""

    rules: list[RuleSection] = []
    effect_floor: Annotated[float, Field(ge=0)] = Policy.effect_floor
    min_probes: Annotated[int, Field(ge=1)] = Policy.min_probes
    min_clusters: Annotated[int, Field(ge=1)] = Policy.min_clusters
    min_replicates: Annotated[int, Field(ge=2)] = Policy.min_replicates
    allow: list[Literal["inconclusive"]] = []


class ScheduleSection(_Section):
    """When `audit serve` runs this audit."""

    cron: str
    timezone: str = "UTC"


class ReportSection(_Section):
    """What a report may show of the probes, and where audits leave it."""

    content: Literal["none", "excerpt"] = "none"
    examples: Annotated[int, Field(ge=0, le=50)] = 6
    confirm: bool = True


class FaithfulnessSection(_Section):
    """On how many probes the maps' faithfulness is measured on both checkpoints (0: not at all), and how."""

    probes: Annotated[int, Field(ge=0, le=10_000)] = 0
    methods: list[str] = ["occlusion", "input_x_gradient"]
    orders: Annotated[int, Field(ge=1, le=100)] = 4

    @field_validator("methods")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        return [check_method(name, ()) for name in value]


class ApprovalsSection(_Section):
    """Whose approvals count: with `allowed_signers` only those signed by one of these SSH keys."""

    allowed_signers: str | None = None


class AuditConfig(_Section):
    """A whole audit.toml."""

    store: StoreSection = StoreSection()
    checkpoints: dict[Literal["before", "after"], CheckpointSection]
    replicates: list[ReplicateSection] = []
    probes: ProbesSection
    domain: DomainSection | None = None
    regions: dict[str, Any] = {}
    method: MethodSection = MethodSection()
    capture: CaptureSection = CaptureSection()
    statistics: StatisticsSection = StatisticsSection()
    gate: GateSection = GateSection()
    schedule: ScheduleSection | None = None
    report: ReportSection = ReportSection()
    faithfulness: FaithfulnessSection = FaithfulnessSection()
    approvals: ApprovalsSection = ApprovalsSection()

    @model_validator(mode="after")
    def _something_to_compare(self) -> Self:
        if "before" not in self.checkpoints:
            raise ValueError("[checkpoints.before] is missing")
        if "after" not in self.checkpoints and self.domain is None:
            raise ValueError("add [checkpoints.after] (checkpoint drift) or [domain] (domain shift)")
        return self

    @field_validator("regions")
    @classmethod
    def _regions(cls, value: dict[str, Any]) -> dict[str, Any]:
        parse_regions(value)
        return value

    def region_records(self) -> tuple[Region, ...]:
        """Return the regions of the file; annotated and automatic ones are added by the pipeline."""
        return parse_regions(self.regions)

    def policy(self) -> Policy:
        """Return the gate's rules and thresholds as a record."""
        gate, statistics = self.gate, self.statistics
        return Policy(
            rules=tuple(Rule(**rule.model_dump()) for rule in gate.rules),
            alpha=statistics.alpha,
            power=statistics.power,
            effect_floor=gate.effect_floor,
            min_probes=gate.min_probes,
            min_clusters=gate.min_clusters,
            min_replicates=gate.min_replicates,
            allow=tuple(gate.allow),
        )


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
    return _resolve(config, base)


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


def _resolve(config: AuditConfig, base: Path) -> AuditConfig:
    """Return `config` with relative paths made absolute against `base`."""
    updates: dict[str, Any] = {
        "store": config.store.model_copy(update={"url": _store_url(config.store.url, base)}),
        "probes": config.probes.model_copy(update={"path": _inside(config.probes.path, base)}),
        "checkpoints": {
            role: source.model_copy(update=_model_paths(source, base))
            for role, source in config.checkpoints.items()
        },
        "replicates": [
            expanded for source in config.replicates for expanded in _expand_replicates(source, base)
        ],
    }
    if config.approvals.allowed_signers is not None:
        signers = _inside(config.approvals.allowed_signers, base)
        updates["approvals"] = config.approvals.model_copy(update={"allowed_signers": signers})
    if config.domain is not None:
        updates["domain"] = config.domain.model_copy(update={"path": _inside(config.domain.path, base)})
    return config.model_copy(update=updates)


def _inside(path: str, base: Path) -> str:
    return str((base / Path(path).expanduser()).resolve())


def _store_url(url: str, base: Path) -> str:
    return url if "://" in url else _inside(url, base)


def _model_ref(ref: str | None, base: Path) -> str | None:
    """Return a local directory as an absolute path; anything else may be a hub id and stays as it is."""
    if ref is None:
        return None
    looks_local = ref.startswith((".", "/", "~")) or ref.count("/") > 1
    if looks_local or (base / ref).exists():
        return _inside(ref, base)
    return ref


def _model_paths(source: CheckpointSection | ReplicateSection, base: Path) -> dict[str, Any]:
    return {"path": _model_ref(source.path, base), "adapter": _model_ref(source.adapter, base)}


def _expand_replicates(source: ReplicateSection, base: Path) -> list[ReplicateSection]:
    if source.floor is not None:
        return [source.model_copy(update={"floor": _inside(source.floor, base)})]
    if source.command is not None and source.path is not None:
        seeds = source.seeds if isinstance(source.seeds, list) else list(range(1, source.seeds + 1))
        return [
            source.model_copy(
                update={"path": _inside(source.path.replace("{seed}", str(seed)), base), "seeds": [seed]}
            )
            for seed in seeds
        ]
    if source.path is None or not glob.has_magic(source.path):
        return [source.model_copy(update=_model_paths(source, base))]
    found = sorted(glob.glob(str(base / Path(source.path).expanduser())))  # noqa: PTH207 (absolute patterns)
    if not found:
        raise ConfigError(f'replicates.path = "{source.path}" matches nothing below {base}; train them first')
    return [
        source.model_copy(
            update=_model_paths(source.model_copy(update={"path": str(Path(match).resolve())}), base)
        )
        for match in found
    ]
