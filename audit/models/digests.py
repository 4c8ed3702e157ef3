"""Which files make a checkpoint, and their SHA-256. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from math import prod
from pathlib import Path
from typing import Any

from audit.errors import CheckpointError
from audit.records import digest

SAFETENSORS = "model.safetensors"
PICKLED = "pytorch_model.bin"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.*",
    "merges.txt",
    "bpe.codes",
    "special_tokens_map.json",
    "added_tokens.json",
    "*.model",
    "*.tiktoken",
    "chat_template.*",
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "*_preprocessor_config.json")
CONFIG_FILES = ("config.json", "generation_config.json", "modules.json")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_HEADS = (["classifier", "weight"], ["score", "weight"], ["out_proj", "weight"])
_LFS = b"version https://git-lfs"

_cache: dict[tuple[Path, int, int], str] = {}


def file_sha256(path: Path) -> str:
    """Return the SHA-256 (hex) of a file, read in blocks and remembered while the file is unchanged."""
    status = path.stat()
    key = (path.resolve(), status.st_size, status.st_mtime_ns)
    if key not in _cache:
        with path.open("rb") as stream:
            _cache[key] = hashlib.file_digest(stream, "sha256").hexdigest()
    return _cache[key]


def part_digest(directory: Path, paths: Sequence[Path]) -> str:
    """Return the digest of a part: names within the checkpoint and contents, never where it lies."""
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(file_sha256, paths))
    return digest([[p.relative_to(directory).as_posix(), h] for p, h in zip(paths, hashes, strict=True)])


def read_json(path: Path, ref: str) -> dict[str, Any]:
    """Return a JSON object of a checkpoint.

    Raises
    ------
    CheckpointError
        When the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {ref}: {path.name} is unreadable ({error}); restore the file"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"checkpoint {ref}: {path.name} holds no JSON object; restore the file")
    return content


def matching(directory: Path, patterns: Sequence[str]) -> tuple[Path, ...]:
    """Return the files of a directory whose names match a pattern, sorted."""
    names = sorted(p.name for p in directory.iterdir() if p.is_file())
    return tuple(directory / name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def weight_candidates(directory: Path) -> Iterator[tuple[str, ...]]:
    """Yield the sets of weight files a checkpoint may have, in the order in which they are looked for."""
    for single in (SAFETENSORS, PICKLED):
        index = directory / f"{single}.index.json"
        if (directory / single).is_file() or not index.is_file():
            yield (single,)
        else:
            yield tuple(sorted(set(read_json(index, str(directory)).get("weight_map", {}).values())))


def weight_files(directory: Path, ref: str) -> tuple[Path, ...]:
    """Return the weight files that will be loaded: safetensors first, then pickled; () when there are none.

    Raises
    ------
    CheckpointError
        When an index names a shard that is not there.
    """
    for names in weight_candidates(directory):
        found = [name for name in names if (directory / name).is_file()]
        if found and len(found) < len(names):
            missing = next(name for name in names if name not in found)
            raise CheckpointError(
                f"checkpoint {ref}: shard {missing} is named in the index and missing; "
                "copy or download it again"
            )
        if found:
            return tuple(directory / name for name in names)
    return ()


def adapter_weights(directory: Path) -> tuple[Path, ...]:
    """Return the file with an adapter's weights, safetensors first; () when there is none."""
    return tuple(directory / name for name in ADAPTER_WEIGHTS if (directory / name).is_file())[:1]


def tensor_shapes(path: Path, ref: str) -> dict[str, tuple[int, ...]]:
    """Return name → shape of the floating-point tensors in a safetensors file, from its header alone.

    Raises
    ------
    CheckpointError
        When the file is cut short, is a Git LFS pointer, or is no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(len(_LFS))
        if start == _LFS:
            raise CheckpointError(f"checkpoint {ref}: {path.name} is a Git LFS pointer; run git lfs pull")
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        stream.seek(8)
        header = stream.read(length) if length <= size else b""
    try:
        entries: Mapping[str, Any] = json.loads(header)
        entries = {name: entry for name, entry in entries.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _damaged(path, ref) from None
    if 8 + length + end != size:
        raise _damaged(path, ref)
    return {name: tuple(entry["shape"]) for name, entry in entries.items() if entry["dtype"] in _FLOATS}


def _damaged(path: Path, ref: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {ref}: {path.name} is damaged or cut short ({path.stat().st_size} bytes); "
        "copy or download it again"
    )


def count_parameters(paths: Sequence[Path], ref: str) -> int:
    """Return the number of weights: exact for safetensors, size / 4 bytes for pickled files."""
    total = 0
    for path in paths:
        if path.suffix == ".safetensors":
            total += sum(prod(shape) for shape in tensor_shapes(path, ref).values())
        else:
            total += path.stat().st_size // 4
    return total


def adapter_head_size(directory: Path) -> int | None:
    """Return how many classes the head inside an adapter tells apart; None when it brings no head."""
    for path in adapter_weights(directory):
        if path.suffix == ".safetensors":
            shapes = tensor_shapes(path, str(directory))
            return next((s[0] for name, s in shapes.items() if name.split(".")[-2:] in _HEADS), None)
    return None
