"""Freeze the baseline and the replicates of an audit into one small file, and read it back.

A floor lets a machine that has neither the models nor torch judge a run captured elsewhere. It holds
the reliance of every probe (float32, compressed), no map and no probe content.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from audit.errors import ConfigError
from audit.pipeline.files import writing
from audit.pipeline.runs import RunData
from audit.records import Column, RunRef, ShareTable, digest

FLOOR_VERSION = 1


@dataclass(frozen=True)
class Floor:
    """A frozen baseline and its replicates."""

    baseline: RunData
    replicates: tuple[RunData, ...]
    created: str


def freeze_floor(baseline: RunData, replicates: Sequence[RunData], path: str | Path, *, created: str) -> Path:
    """Write a floor file atomically.

    Parameters
    ----------
    baseline : RunData
        The run of the checkpoint before.
    replicates : sequence of RunData
        Its harmless re-trainings, each with its kind.
    path : str or Path
    created : str
        ISO date that reports show beside the floor.

    Returns
    -------
    Path

    Raises
    ------
    ConfigError
        When there is no replicate to freeze.
    """
    if not replicates:
        raise ConfigError("there is no replicate to freeze; add [[replicates]] to the configuration")
    runs = [baseline, *replicates]
    body = {
        "kind": "rollout-audit floor",
        "version": FLOOR_VERSION,
        "created": created,
        "inputs_digest": baseline.inputs_digest,
        "regions_digest": baseline.regions_digest,
        "identity": dict(baseline.identity),
        "probe_ids": list(baseline.shares.probe_ids),
        "columns": [[column.region, column.stream] for column in baseline.shares.columns],
        "groups": list(baseline.groups),
        "segments": {key: list(values) for key, values in baseline.segments.items()},
        "runs": [vars(run.ref) for run in runs],
        "shares": [_pack(run.shares.values) for run in runs],
    }
    text = json.dumps({**body, "digest": digest(body)}, indent=1, allow_nan=False)
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    return path


def read_floor(path: str | Path) -> Floor:
    """Read a floor file.

    Parameters
    ----------
    path : str or Path
        What :func:`freeze_floor` or `audit floor` wrote.

    Returns
    -------
    Floor

    Raises
    ------
    ConfigError
        When the file is missing, is not a floor, was changed by hand or comes from a newer version.
    """
    body = _read_body(Path(path))
    columns = tuple(Column(region, stream) for region, stream in body["columns"])
    runs = tuple(
        RunData(
            ref=RunRef(**ref),
            inputs_digest=body["inputs_digest"],
            regions_digest=body["regions_digest"],
            identity=body["identity"],
            shares=ShareTable(
                tuple(body["probe_ids"]),
                columns,
                _unpack(packed, (len(body["probe_ids"]), len(columns))),
            ),
            groups=tuple(body["groups"]),
            segments={key: tuple(values) for key, values in body["segments"].items()},
            frozen_with=body["runs"][0]["run_id"],
        )
        for ref, packed in zip(body["runs"], body["shares"], strict=True)
    )
    return Floor(baseline=runs[0], replicates=runs[1:], created=body["created"])


def as_frozen(run: RunData, baseline: RunData) -> RunData:
    """Return a stored run as :func:`read_floor` gives it: float32 shares of the whole stack, no maps.

    Parameters
    ----------
    run, baseline : RunData
        The run, and the baseline that it was frozen with.
    """
    return replace(
        run,
        identity=baseline.identity,
        shares=replace(run.shares, values=run.shares.values.astype("<f4").astype(np.float64)),
        layer_shares=None,
        store=None,
        sizes={},
        frozen_with=baseline.ref.run_id,
    )


def _read_body(path: Path) -> Mapping[str, Any]:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"floor {path} does not exist; `audit floor` writes one") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"floor {path} is not readable: {error}; freeze it again with `audit floor`"
        ) from None
    if not isinstance(body, dict) or body.get("kind") != "rollout-audit floor":
        raise ConfigError(f"{path} is not a floor; `audit floor` writes one")
    if body.get("version", 0) > FLOOR_VERSION:
        raise ConfigError(f"floor {path} has version {body['version']}; upgrade rollout-audit")
    stated = body.pop("digest", None)
    if stated != digest(body):
        raise ConfigError(f"floor {path} was changed after it was frozen; freeze it again with `audit floor`")
    return body


def _pack(values: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(zlib.compress(values.astype("<f4").tobytes(), 9)).decode()


def _unpack(text: str, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    raw = zlib.decompress(base64.b64decode(text))
    return np.frombuffer(raw, "<f4").reshape(shape).astype(np.float64)
