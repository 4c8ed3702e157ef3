"""Which numbers of an image or a sound belong to each position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from audit.capture.inputs.cells import Cells, cells_of, column_cells, patch_cells, wave_cells
from audit.capture.inputs.encoded import Encoded
from audit.records import Positions, Probe


def slow_patches(size, patch, strides):
    """Owner of each cell (time, band), by the distance to every patch that reads it."""
    columns, rows = ((n - patch) // s + 1 for n, s in zip(size, strides, strict=True))
    owner = np.full(size, -1)
    for t in range(size[0]):
        for b in range(size[1]):
            best = None
            for row in range(rows):
                for column in range(columns):
                    corner = column * strides[0], row * strides[1]
                    reads = all(0 <= at - low < patch for at, low in zip((t, b), corner, strict=True))
                    # By bands and by time alike: the rectangle around a centre.
                    away = tuple(
                        abs(at - low - (patch - 1) / 2) for at, low in zip((b, t), corner[::-1], strict=True)
                    )
                    found = (*away, row * columns + column)
                    if reads and (best is None or found < best):
                        best = found
            owner[t, b] = -1 if best is None else best[-1]
    return owner


@pytest.mark.parametrize(
    ("size", "patch", "strides"),
    [((16, 8), 4, (4, 4)), ((17, 11), 4, (3, 2)), ((20, 9), 5, (2, 3)), ((12, 9), 3, (4, 3))],
)
def test_cells_of_a_spectrogram_belong_to_the_patch_with_the_nearest_centre(size, patch, strides):
    cells = patch_cells(size, patch, strides, 2, 0.5)
    expected = slow_patches(size, patch, strides)
    np.testing.assert_array_equal(cells.owner, np.where(expected < 0, -1, expected + 2))
    count = expected.max() + 1
    assert sorted(set(expected[expected >= 0].tolist())) == list(range(count))  # every patch has a share


def test_frames_of_a_waveform_have_the_samples_of_their_seconds():
    cells = wave_cells(107, 20, 4, 0.0)
    assert np.bincount(cells.owner).tolist() == [20, 20, 20, 47]
    assert cells.owner[60] == 3


def test_columns_of_a_spectrogram_are_shared_evenly():
    cells = column_cells(3, 8, 4, torch.zeros(1, 3, 1))
    assert cells.owner.shape == (3, 8)
    assert cells.owner[2].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_sums_over_positions_are_sums_over_their_numbers():
    rng = np.random.default_rng(0)
    cells = Cells("x", rng.integers(-1, 5, (6, 7)), "silence", torch.zeros(1))
    parts = torch.from_numpy(rng.standard_normal((1, 3, 6, 7)))
    expected = [float(parts[0, :, cells.owner == i].sum()) for i in range(5)]
    np.testing.assert_allclose(cells.summed(parts, 5), expected)
    everything = Cells("x", np.abs(cells.owner), "silence", torch.zeros(1))
    assert float(everything.summed(parts, 5).sum()) == pytest.approx(float(parts.sum()))


def test_numbers_are_mixed_by_the_share_of_their_position_and_those_of_none_stay():
    cells = Cells("x", np.array([0, 0, 1, -1]), "silence", torch.tensor([[8.0]]))
    values = torch.tensor([[1.0, 2.0, 4.0, 6.0]])
    assert cells.mixed(values, np.array([1.0, 0.25])).tolist() == [[8.0, 8.0, 5.0, 6.0]]
    assert cells.mixed(values, np.array([0.5, 0.0]), torch.zeros(1, 4)).tolist() == [[0.5, 1.0, 4.0, 6.0]]
    assert cells.mixed(values, np.zeros(2)).tolist() == values.tolist()
    assert cells.mixed(values, np.array([0.99999993, 0.0])).tolist() == [[8.0, 8.0, 4.0, 6.0]]


def test_pixels_of_an_image_belong_to_patches_and_a_remainder_to_none():
    pixels = torch.arange(2 * 5 * 7, dtype=torch.float32).reshape(1, 2, 5, 7)
    marks = np.array([True, False, False, False, False, False, False])
    item = Encoded(Probe("p"), {"pixel_values": pixels}, Positions("patch", marks, grid=(2, 3)))
    cells = cells_of(item)
    assert cells is not None
    assert cells.owner.tolist() == [
        *[[1, 1, 2, 2, 3, 3, -1]] * 2,
        *[[4, 4, 5, 5, 6, 6, -1]] * 2,
        [-1] * 7,
    ]
    torch.testing.assert_close(cells.empty.flatten(), pixels.double().mean(dim=(0, 2, 3)))


def test_text_has_no_cells():
    item = Encoded(
        Probe("p", text="x"), {"input_ids": torch.tensor([[1]])}, Positions("token", np.ones(1, bool))
    )
    assert cells_of(item) is None
