"""The engines on a GPU: fused kernels, bfloat16, long inputs; on a CPU the same in small.

Run by ``make bench-gpu``, within 8 minutes. Ratios are to the plain forward pass of the same round, memory
is the peak above it. The model computes in bfloat16; rows and regions are accumulated in float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers

from tests.benchmarks import engine_cases as cases
from tests.benchmarks.measuring import MEGABYTE, Section, status

REPORT = Section("Accelerator")
ROUNDS = 5
TOLERANCE = 1e-4
"""Largest difference of shares from the dense product of the same bfloat16 queries and keys."""


@dataclass(frozen=True)
class Scale:
    """How large the cases are.

    Attributes
    ----------
    device : torch.device
    lengths : positions of the text model
    shape : its layers, width and heads
    images : batch of the vision model
    image_shape : its layers, width and heads
    """

    device: torch.device
    lengths: tuple[int, ...]
    shape: tuple[int, int, int]
    images: int
    image_shape: tuple[int, int, int]


BASE, LARGE = (12, 768, 12), (24, 1024, 16)


def scale_of(device: torch.device) -> Scale:
    """Return the sizes for an accelerator, or small ones that a CPU finishes in seconds."""
    if device.type == "cpu":
        return Scale(device, (64, 128), (2, 64, 4), 2, (2, 64, 4))
    return Scale(device, (2048, 8192, 32768), BASE, 64, LARGE)


def text_case(scale: Scale, n: int) -> cases.Subject:
    layers, width, heads = scale.shape
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=n,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False)
    return placed(scale, model, {"input_ids": torch.randint(5, 30000, (1, n))}, n, 1)


def image_case(scale: Scale) -> cases.Subject:
    layers, width, heads = scale.image_shape
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.ViTModel(config, add_pooling_layer=False)
    pixels = torch.randn(scale.images, 3, 224, 224)
    return placed(scale, model, {"pixel_values": pixels}, 197, scale.images)


def placed(
    scale: Scale, model: torch.nn.Module, tensors: dict[str, torch.Tensor], n: int, batch: int
) -> cases.Subject:
    one = cases.subject(model.eval().to(scale.device, torch.bfloat16), tensors, n, batch)
    one.read, one.valid = one.read.to(scale.device), one.valid.to(scale.device)
    return one


def measured(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds and MB above what was allocated before."""
    if device.type != "cuda":
        before, start = status("VmRSS"), time.perf_counter()
        work()
        return time.perf_counter() - start, max(0.0, (status("VmRSS") - before) / MEGABYTE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / MEGABYTE


def compare(name: str, one: cases.Subject, engines: dict[str, cases.Engine], scale: Scale) -> float:
    """Note each engine beside the plain pass; return the median seconds of the plain pass."""
    cases.plain(one)
    plain, found = [], {engine: ([], []) for engine in engines}  # type: ignore[var-annotated]
    for run in engines.values():
        run(one)  # kernels are chosen and compiled in the first call
    for _ in range(ROUNDS):
        base, base_memory = measured(scale.device, lambda: cases.plain(one))
        plain.append(base)
        for engine, run in engines.items():
            seconds, memory = measured(scale.device, lambda run=run: run(one))  # type: ignore[misc]
            found[engine][0].append(seconds / base)
            found[engine][1].append(memory - base_memory)
    for engine, (ratios, memory) in found.items():
        REPORT.note(
            f"- {name}, {engine}: {statistics.median(ratios):.2f}× ({min(ratios):.2f}–{max(ratios):.2f}), "
            f"{statistics.median(memory):+,.0f} MB"
        )
    return statistics.median(plain)


def check_exactness(scale: Scale) -> float:
    """Return the largest difference of a row and of regions from the dense product at the shortest length."""
    one = text_case(scale, scale.lengths[0])
    dense = cases.streaming(one).float()
    row = cases.row(one).float()
    columns = cases.region_columns(one)
    shares = torch.einsum("bk,bkc->bc", dense, columns.to(dense))
    error = max(float((row - dense).abs().max()), float((cases.regions(one).to(shares) - shares).abs().max()))
    if not error <= TOLERANCE:
        raise AssertionError(f"engines differ from the dense product by {error:.2g}, allowed {TOLERANCE:g}")
    return error


def main(device: torch.device | None = None) -> None:
    """Run every case and write the section of RESULTS.md."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = scale_of(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: small sizes on the CPU"
    REPORT.note(f"{name}; model in bfloat16, medians of {ROUNDS} rounds.\n")
    for n in scale.lengths:
        one = text_case(scale, n)
        engines: dict[str, cases.Engine] = {"regions": cases.regions, "row": cases.row}
        if n <= 8192:
            engines["streaming"] = cases.streaming
        compare(f"{scale.shape[0]} layers of {scale.shape[1]}, n = {n:,}", one, engines, scale)
    images = image_case(scale)
    seconds = compare(
        f"{scale.image_shape[0]} layers of {scale.image_shape[1]}, n = 197, batch {scale.images}",
        images,
        {"row": cases.row, "streaming": cases.streaming, "regions": cases.regions},
        scale,
    )
    REPORT.note(f"- the plain pass takes {scale.images / seconds:,.0f} images a second")
    REPORT.note(f"- largest difference from the dense product: {check_exactness(scale):.1e}")


if __name__ == "__main__":
    main()
