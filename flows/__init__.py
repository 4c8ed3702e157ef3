"""Prefect flows around the pipeline: decorators, schedules and retries; no logic of their own."""

import os

QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
}
"""No telemetry, and time enough for the ephemeral server on a small machine."""

for _name, _value in QUIET.items():
    os.environ.setdefault(_name, _value)
