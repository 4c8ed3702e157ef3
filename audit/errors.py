"""The exception tree and the exit codes of the command line.

Every error a user can cause is an :class:`AuditError`: one line that names the thing, the place and
the remedy. Code that computes (methods, metrics, statistics) raises ``ValueError`` instead, since a
wrong argument there is a mistake of the caller and not of the person at the terminal.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process returns; a contract with CI systems."""

    PASS = 0
    BUG = 1
    USAGE = 2
    FAIL = 3
    INCONCLUSIVE = 4
    NOTHING_EVALUATED = 5
    CONFIG = 10
    PROBES = 11
    CHECKPOINT = 12
    CAPTURE = 13
    STORE = 14
    INTERRUPTED = 130


class AuditError(Exception):
    """An error that the user can mend; its message is one line and ends with the remedy."""

    exit_code: ExitCode = ExitCode.BUG


class ConfigError(AuditError):
    """The configuration is unreadable, incomplete or has an unknown key."""

    exit_code = ExitCode.CONFIG


class ProbeError(AuditError):
    """A probe set or a region definition cannot be used."""

    exit_code = ExitCode.PROBES


class CheckpointError(AuditError):
    """A checkpoint cannot be loaded or lacks what the method needs."""

    exit_code = ExitCode.CHECKPOINT


class CaptureError(AuditError):
    """Attention could not be captured exactly, or two identical passes disagree."""

    exit_code = ExitCode.CAPTURE


class StoreError(AuditError):
    """The store is damaged, unreadable or written by a newer version."""

    exit_code = ExitCode.STORE


class NothingEvaluatedError(AuditError):
    """There is nothing to judge: no rules, no pair of runs, no approved baseline."""

    exit_code = ExitCode.NOTHING_EVALUATED
