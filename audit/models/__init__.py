"""Load checkpoints and their processors, and say what they are.

Identity needs no model: :func:`checkpoint_info` hashes files and imports neither torch nor transformers.
Loading never invents weights: a head that a checkpoint lacks is left away, a backbone that it lacks is
an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from audit.errors import CheckpointError
from audit.models import digests as files
from audit.models.hub import resolve
from audit.models.tasks import BACKBONE, is_classifier, task_of
from audit.records import Checkpoint, CheckpointInfo, digest

_CORE_FLOPS = 4e10
"""Operations a second of one logical core; half of what one without a twin does (measured: 8e10)."""
_GPU_FLOPS = 2e13
_LIBRARIES_GB = 0.6
_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_POOLINGS = {"cls": "cls", "mean": "mean", "lasttoken": "last"}


def checkpoint_info(ref: str, *, revision: str | None = None, adapter: str | None = None) -> CheckpointInfo:
    """Return the identity of a checkpoint from the files that loading would read.

    Parameters
    ----------
    ref : str
        Local directory, or hub id.
    revision : str, optional
        Branch, tag or commit of a hub id.
    adapter : str, optional
        Local directory or hub id of a PEFT adapter on top of `ref`.

    Returns
    -------
    CheckpointInfo
        Its digests depend on names within the checkpoint and on contents, not on where it lies.

    Raises
    ------
    CheckpointError
        When the directory, config.json, the weights, or the tokenizer and processor are missing or
        damaged, or the hub does not give them.
    """
    directory, commit = resolve(ref, revision)
    config = _config(directory, ref)
    weights = files.weight_files(directory, ref)
    if not weights:
        raise CheckpointError(
            f"checkpoint {ref}: no weights, expected {files.SAFETENSORS} or {files.PICKLED}; "
            "save the model there"
        )
    home = _adapter_directory(adapter, ref) if adapter else None
    processor_home = home if home is not None and _has_vocabulary(home) else directory
    processor = files.matching(processor_home, files.TOKENIZER_FILES + files.PROCESSOR_FILES)
    if not processor:
        raise CheckpointError(
            f"checkpoint {ref}: neither tokenizer nor image or audio processor files; "
            "save the processor into the same directory"
        )
    parts = {
        "weights": files.part_digest(directory, weights),
        "config": files.part_digest(directory, _config_files(directory, config)),
        "tokenizer": files.part_digest(processor_home, processor),
    }
    adapter_files = () if home is None else (home / files.ADAPTER_CONFIG, *files.adapter_weights(home))
    if home is not None:
        parts["adapter"] = files.part_digest(home, adapter_files)
    return CheckpointInfo(
        ref=ref,
        digest=digest(parts),
        weights_digest=digest({k: v for k, v in parts.items() if k in ("weights", "adapter")}),
        tokenizer_digest=parts["tokenizer"],
        revision=commit,
        adapter=adapter,
        architecture=next(iter(config.get("architectures") or ()), None),
        model_type=config.get("model_type"),
        labels=_labels(config, home),
        parts=parts,
        parameters=files.count_parameters((*weights, *adapter_files[1:]), ref),
    )


def load_checkpoint(
    ref: str,
    *,
    device: str = "auto",
    dtype: Any = None,
    adapter: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    attention_implementation: str | None = None,
) -> Checkpoint:
    """Load a checkpoint in eval mode, with the processor saved beside it.

    The class is the one that config.json names in ``architectures``. A checkpoint without a task head,
    or whose head has no saved weights, is loaded as a backbone: ``has_head`` is False.

    Parameters
    ----------
    ref : str
        Local directory, or hub id.
    device : str
        ``auto`` (CUDA when there is one, else CPU; never MPS), or a torch device.
    dtype : str or torch.dtype, optional
        None is float32; ``auto`` keeps what the checkpoint was saved in.
    adapter : str, optional
        Local directory or hub id of a PEFT adapter on top of `ref`.
    revision : str, optional
        Branch, tag or commit of a hub id.
    trust_remote_code : bool
        Run Python code that the checkpoint brings along. Read it first.
    attention_implementation : str, optional
        ``sdpa``, ``eager``, ...; None leaves the choice to transformers.

    Returns
    -------
    Checkpoint

    Raises
    ------
    CheckpointError
        When something is missing, damaged, does not fit together, or holds NaN or infinite weights.
    """
    info = checkpoint_info(ref, revision=revision, adapter=adapter)
    try:
        from audit.models import loading, processors
    except ImportError as error:
        raise CheckpointError(
            f"checkpoint {ref}: loading needs torch and transformers ({error}); "
            "pip install 'rollout-audit[capture]'"
        ) from None
    directory, _ = resolve(ref, revision)
    home = None if adapter is None else _adapter_directory(adapter, ref)
    request = loading.Request(
        ref=ref,
        directory=directory,
        architecture=info.architecture,
        adapter=home,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attention_implementation=attention_implementation,
    )
    loaded = loading.load(request)
    processor_home = home if home is not None and _has_vocabulary(home) else directory
    return Checkpoint(
        info=info,
        model=loaded.model,
        processor=processors.load_processor(request, processor_home, loaded),
        task=loaded.task,
        has_head=loaded.has_head,
        pooling=_pooling(directory, ref),
        base_has_head=loaded.base_has_head,
    )


@contextmanager
def adapter_disabled(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Turn a loaded base + adapter into its base, and back on leaving.

    Parameters
    ----------
    checkpoint : Checkpoint
        Loaded with an adapter.

    Yields
    ------
    Checkpoint
        The base: the same model in memory with the adapter off, and the base's own info. Its
        processor stays that of the adapter; compare ``tokenizer_digest`` when the adapter ships one.

    Raises
    ------
    CheckpointError
        When there is no adapter, or switching it off would not give the base back (trained biases).
    """
    info = checkpoint.info
    if info.adapter is None:
        raise CheckpointError(
            f"checkpoint {info.ref}: loaded without an adapter, there is none to switch off"
        )
    from audit.models import loading

    base = checkpoint_info(info.ref, revision=info.revision)
    has_head = checkpoint.has_head and checkpoint.base_has_head
    with loading.adapter_off(checkpoint.model, info.adapter):
        yield replace(
            checkpoint, info=base, has_head=has_head, task=checkpoint.task if has_head else BACKBONE
        )


@dataclass(frozen=True)
class Estimate:
    """Rough cost of a capture: memory in GB, time in minutes."""

    gigabytes: float
    minutes: float


def estimate(
    info: CheckpointInfo,
    probes: int,
    tokens: float,
    *,
    dtype: str = "float32",
    device_type: str = "cpu",
    passes: float = 1.0,
    cores: int | None = None,
) -> Estimate:
    """Return what capturing a checkpoint will roughly cost, for the message before a long one.

    Time is 2 × parameters × tokens floating-point operations a probe and forward pass (Kaplan et al. 2020,
    section 2.1), at 40 GFLOP/s on each core of a CPU and 20 TFLOP/s on a GPU.

    Parameters
    ----------
    info : CheckpointInfo
    probes : int
        Number of probes.
    tokens : float
        Mean number of positions a probe.
    dtype : str
        Type of the loaded weights.
    device_type : str
        ``cpu`` or ``cuda``.
    passes : float
        Forward passes that the method takes.
    cores : int, optional
        By default those of this machine.

    Returns
    -------
    Estimate

    Examples
    --------
    >>> bert = CheckpointInfo("bert", "", "", "", parameters=110_000_000)
    >>> cost = estimate(bert, 2000, 128, cores=2)
    >>> round(cost.gigabytes, 1), round(cost.minutes)
    (1.0, 12)
    """
    gigabytes = info.parameters * _BYTES.get(dtype, 4) / 1e9 + _LIBRARIES_GB
    operations = 2.0 * info.parameters * tokens * probes * passes
    speed = _CORE_FLOPS * (cores or os.cpu_count() or 1) if device_type == "cpu" else _GPU_FLOPS
    return Estimate(gigabytes=gigabytes, minutes=operations / speed / 60.0)


def compatible_targets(before: CheckpointInfo, after: CheckpointInfo) -> None:
    """Refuse a target class on two checkpoints that do not know the same classes.

    Raises
    ------
    CheckpointError
        When the label sets differ; the order of the labels does not matter.

    Examples
    --------
    >>> compatible_targets(
    ...     CheckpointInfo("a", "", "", "", labels=("no", "yes")),
    ...     CheckpointInfo("b", "", "", "", labels=("yes", "no")),
    ... )
    """
    if set(before.labels) == set(after.labels):
        return
    difference = sorted(set(before.labels) ^ set(after.labels))
    raise CheckpointError(
        f"checkpoints {before.ref} ({len(before.labels)} labels) and {after.ref} ({len(after.labels)}) "
        f"have different label sets ({_listed(difference)} in one only); name the same classes in id2label, "
        "or use a method without a target class"
    )


def _listed(names: list[str], limit: int = 5) -> str:
    shown = ", ".join(repr(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def _config(directory: Path, ref: str) -> dict[str, Any]:
    path = directory / "config.json"
    adapter_config = directory / files.ADAPTER_CONFIG
    if adapter_config.is_file() and not path.is_file():
        base = files.read_json(adapter_config, ref).get("base_model_name_or_path") or "its base model"
        raise CheckpointError(
            f"checkpoint {ref}: this is a PEFT adapter; give its base ({base}) as path "
            "and this directory as adapter"
        )
    if adapter_config.is_file():
        raise CheckpointError(
            f"checkpoint {ref}: holds a whole model and {files.ADAPTER_CONFIG}; move the adapter to a "
            "directory of its own and name it as adapter, or delete that file"
        )
    if not path.is_file():
        raise CheckpointError(f"checkpoint {ref}: no config.json; save the model there with save_pretrained")
    return files.read_json(path, ref)


def _config_files(directory: Path, config: Mapping[str, Any]) -> tuple[Path, ...]:
    patterns = files.CONFIG_FILES + (("*.py",) if "auto_map" in config else ())
    pooling = [path for path in (_pooling_file(directory),) if path is not None]
    return (*files.matching(directory, patterns), *pooling)


def _adapter_directory(adapter: str, ref: str) -> Path:
    home, _ = resolve(adapter)
    if not (home / files.ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"adapter {adapter} of checkpoint {ref}: no {files.ADAPTER_CONFIG}; "
            "name the directory that PEFT saved"
        )
    if not files.adapter_weights(home):
        raise CheckpointError(
            f"adapter {adapter} of checkpoint {ref}: no weights, expected {files.ADAPTER_WEIGHTS[0]}; "
            "save it again"
        )
    return home


def _has_vocabulary(directory: Path) -> bool:
    return bool(files.matching(directory, ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")))


def _labels(config: Mapping[str, Any], adapter: Path | None) -> tuple[str, ...]:
    """Return the class names in the order of the logits; () for a checkpoint that does not classify."""
    architecture = next(iter(config.get("architectures") or ()), None)
    names = config.get("id2label") or {}
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    classifies = is_classifier(task_of(architecture, config.get("model_type")))
    if adapter is not None and not classifies:
        size = files.adapter_head_size(adapter)
        return () if size is None else labels if len(labels) == size else _numbered(size)
    return (labels or _numbered(2)) if classifies else ()


def _numbered(size: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{i}" for i in range(size))


def _pooling_file(directory: Path) -> Path | None:
    path = directory / "1_Pooling" / "config.json"
    return path if path.is_file() else None


def _pooling(directory: Path, ref: str) -> str | None:
    """Return the pooling that sentence-transformers saved: ``cls``, ``mean``, ``last``, or None."""
    path = _pooling_file(directory)
    if path is None:
        return None
    config = files.read_json(path, ref)
    legacy = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    modes = config.get("pooling_mode") or [
        m for m, key in legacy.items() if config.get(f"pooling_mode_{key}")
    ]
    modes = [modes] if isinstance(modes, str) else list(modes)
    return _POOLINGS.get(modes[0]) if len(modes) == 1 else None
