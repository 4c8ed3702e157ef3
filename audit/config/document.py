"""A whole audit.toml."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from audit._method_parameters import check_method
from audit.config.capture import CaptureSection, MethodSection
from audit.config.judging import GateSection, StatisticsSection
from audit.config.section import Section
from audit.config.sources import CheckpointSection, DomainSection, ProbesSection, ReplicateSection
from audit.records import Policy, Region, Rule
from audit.regions import parse_regions

DEFAULT_STORE = "data/store"


class StoreSection(Section):
    """Where runs, comparisons, approvals and the log are kept."""

    url: str = DEFAULT_STORE


class ScheduleSection(Section):
    """When `audit serve` runs this audit."""

    cron: str
    timezone: str = "UTC"


class ReportSection(Section):
    """What a report may show of the probes, and where audits leave it."""

    content: Literal["none", "excerpt"] = "none"
    examples: Annotated[int, Field(ge=0, le=50)] = 6
    confirm: bool = True
    occlusion: Literal["mean", "blur"] = "mean"


class FaithfulnessSection(Section):
    """On how many probes the maps' faithfulness is measured on both checkpoints (0: not at all), and how."""

    probes: Annotated[int, Field(ge=0, le=10_000)] = 0
    methods: list[str] = ["occlusion", "input_x_gradient"]
    orders: Annotated[int, Field(ge=1, le=100)] = 4

    @field_validator("methods")
    @classmethod
    def _known(cls, value: list[str]) -> list[str]:
        return [check_method(name, ()) for name in value]


class ApprovalsSection(Section):
    """Whose approvals count: with `allowed_signers` only those signed by one of these SSH keys."""

    allowed_signers: str | None = None


class AuditConfig(Section):
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
