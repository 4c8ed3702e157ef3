"""Every array in tests/data/published.npz, reproduced."""

from pathlib import Path

import numpy as np
import pytest
import torch

from audit.methods import (
    attention_flow,
    attention_rollout,
    encoder_decoder_relevance,
    gradient_rollout,
    two_stream_relevance,
)
from audit.methods.gradient import gradient_row_step, weigh_by_gradient
from audit.methods.two_stream import CoAttention, SelfAttention

PUBLISHED = dict(np.load(Path(__file__).parents[1] / "data" / "published.npz"))
CASES = ("tiny", "dense", "causal")


def assert_reproduced(found, expected):
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("name", "residual"), [("", 0.5), ("_without_residual", 0.0), ("_residual_0.8", 0.8)]
)
def test_rollout_reproduces_every_layer(case, name, residual):
    attention = PUBLISHED[f"{case}/attention"]
    expected = PUBLISHED[f"{case}/rollout_every_layer{name}"]
    for layer in range(len(attention)):
        assert_reproduced(attention_rollout(attention[: layer + 1], residual=residual), expected[layer])


@pytest.mark.parametrize("case", CASES)
def test_rollout_from_second_layer_is_reproduced(case):
    found = attention_rollout(list(PUBLISHED[f"{case}/attention"]), start_layer=1)
    assert_reproduced(found, PUBLISHED[f"{case}/rollout_from_second_layer"])


@pytest.mark.parametrize("case", CASES)
def test_flow_reproduces_every_layer(case):
    attention = PUBLISHED[f"{case}/attention"]
    for layer in range(len(attention)):
        assert_reproduced(
            attention_flow(attention[: layer + 1]), PUBLISHED[f"{case}/flow_every_layer"][layer]
        )


@pytest.mark.parametrize("case", ["dense", "causal"])
def test_gradient_relevance_is_reproduced(case):
    attention, gradient = PUBLISHED[f"{case}/attention"], PUBLISHED[f"{case}/gradient"]
    assert_reproduced(gradient_rollout(attention, gradient), PUBLISHED[f"{case}/gradient_relevance"])


@pytest.mark.parametrize("case", ["dense", "causal"])
def test_gradient_row_from_the_last_layer_down_is_reproduced(case):
    attention, gradient = PUBLISHED[f"{case}/attention"], PUBLISHED[f"{case}/gradient"]
    row = np.zeros((attention.shape[1], attention.shape[-1]))
    row[:, -1] = 1
    for layer in reversed(range(len(attention))):
        row = gradient_row_step(row, weigh_by_gradient(attention[layer], gradient[layer]))
    assert_reproduced(row, PUBLISHED[f"{case}/gradient_relevance"][:, -1])


def test_encoder_decoder_relevance_is_reproduced():
    names = ("enc_attn", "dec_attn", "cross_attn", "enc_grad", "dec_grad", "cross_grad")
    arrays = [PUBLISHED[f"encoder_decoder/{name}"][:, None] for name in names]
    assert_reproduced(encoder_decoder_relevance(*arrays)[0], PUBLISHED["encoder_decoder/relevance"])
    tensors = [torch.from_numpy(array) for array in arrays]
    assert_reproduced(encoder_decoder_relevance(*tensors)[0].numpy(), PUBLISHED["encoder_decoder/relevance"])


def test_two_stream_relevance_reproduces_the_encoder_decoder_arrays():
    def layers(name):
        attention = PUBLISHED[f"encoder_decoder/{name}_attn"][:, None]
        return list(zip(attention, PUBLISHED[f"encoder_decoder/{name}_grad"][:, None], strict=True))

    steps = [SelfAttention("second", *layer) for layer in layers("enc")]
    for own, cross in zip(layers("dec"), layers("cross"), strict=True):
        steps += [SelfAttention("first", *own), CoAttention(*cross)]
    relevances = two_stream_relevance(steps)
    assert_reproduced(relevances.first_second[0], PUBLISHED["encoder_decoder/relevance"])
    assert_reproduced(relevances.second_second[0], PUBLISHED["encoder_decoder/relevance_encoder"])
    assert_reproduced(relevances.first_first[0], PUBLISHED["encoder_decoder/relevance_decoder"])
