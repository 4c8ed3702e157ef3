"""The prepared GPU benchmark runs on a CPU, small, and checks its engines."""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks import accelerator, measuring


def test_bench_gpu_runs_small_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "RESULTS", tmp_path / "RESULTS.md")
    monkeypatch.setattr(accelerator, "ROUNDS", 1)
    accelerator.main(torch.device("cpu"))
    page = (tmp_path / "RESULTS.md").read_text()
    assert "## Accelerator" in page
    assert "no GPU" in page
    assert page.count("regions: ") == 3
    assert "largest difference from the dense product" in page


def test_bench_gpu_stops_where_an_engine_is_wrong(monkeypatch):
    scale = accelerator.scale_of(torch.device("cpu"))
    right = accelerator.cases.row
    monkeypatch.setattr(accelerator.cases, "row", lambda one: right(one).roll(1, dims=1))
    with pytest.raises(AssertionError, match="differ from the dense product"):
        accelerator.check_exactness(scale)
