"""audit.toml → :class:`AuditConfig`; strict: an unknown key is an error that names the nearest valid one.

Relative paths are resolved against the folder of the configuration file. Defaults are those of the
records, so that the file, the command line and the API share one spelling of each.
"""

from audit.config.capture import CaptureSection, MethodSection
from audit.config.document import (
    DEFAULT_STORE,
    ApprovalsSection,
    AuditConfig,
    FaithfulnessSection,
    ReportSection,
    ScheduleSection,
    StoreSection,
)
from audit.config.judging import DEFAULT_MEASURES, RESAMPLES, GateSection, RuleSection, StatisticsSection
from audit.config.reading import load_config, parse_config
from audit.config.sources import CheckpointSection, DomainSection, ProbesSection, ReplicateSection

__all__ = [
    "DEFAULT_MEASURES",
    "DEFAULT_STORE",
    "RESAMPLES",
    "ApprovalsSection",
    "AuditConfig",
    "CaptureSection",
    "CheckpointSection",
    "DomainSection",
    "FaithfulnessSection",
    "GateSection",
    "MethodSection",
    "ProbesSection",
    "ReplicateSection",
    "ReportSection",
    "RuleSection",
    "ScheduleSection",
    "StatisticsSection",
    "StoreSection",
    "load_config",
    "parse_config",
]
