"""Folds of models with two streams: fed layer by layer, against slow references and published arrays."""

import re
from pathlib import Path
from types import SimpleNamespace

import networkx
import numpy as np
import pytest
import torch

from audit._method_parameters import PARAMETERS
from audit.capture.attention.interface import AttentionCall
from audit.capture.engines.settings import FoldSettings
from audit.capture.pairs.co_attention import CoFold, step_of
from audit.capture.pairs.encoder_decoder import cross_fold
from audit.capture.pairs.gradient import RelevanceFold
from audit.capture.pairs.methods import REFUSED, check_pair_settings, methods_of
from audit.errors import CaptureError, ConfigError
from audit.methods import encoder_decoder_rollout
from tests.reference import random_attention

PUBLISHED = dict(np.load(Path(__file__).parents[1] / "data" / "published.npz"))
METHODS_PAGE = Path(__file__).parents[2] / "docs" / "methods.md"
SOURCE, STEPS, LAYERS = 4, 3, 2


def plan(encoder=LAYERS, decoder=LAYERS):
    """A plan with encoder layers "e0"…, and decoder layers "d0" (self) and "c0" (cross)."""
    layers = [SimpleNamespace(path=f"e{i}", stack="enc", block=str(i), kind="self") for i in range(encoder)]
    for i in range(decoder):
        layers.append(SimpleNamespace(path=f"d{i}", stack="dec", block=str(i), kind="self"))
        layers.append(SimpleNamespace(path=f"c{i}", stack="dec", block=str(i), kind="cross"))
    return SimpleNamespace(layers=layers, stacks=("enc", "dec"), wiring="encoder-decoder")


def attention(seed=0, batch=2, heads=3):
    encoder = random_attention(seed, LAYERS, batch, heads, SOURCE)
    decoder = random_attention(seed + 1, LAYERS, batch, heads, STEPS, causal=True)
    cross = random_attention(seed + 2, LAYERS, batch, heads, STEPS, keys=SOURCE)
    return [torch.from_numpy(one) for one in (encoder, decoder, cross)]


def valid(batch=2):
    return torch.ones(batch, SOURCE, dtype=torch.bool), torch.ones(batch, STEPS, dtype=torch.bool)


def row(index, batch=2):
    read = torch.zeros(batch, STEPS)
    read[:, index] = 1
    return read


def call(path, weights):
    return AttentionCall(path, weights, torch.zeros(1, dtype=weights.dtype))


def filled(settings, read, stacks):
    """Feed the three stacks in the order of a forward pass."""
    fold = cross_fold(plan(), settings, valid(), read)
    for i, weights in enumerate(stacks[0]):
        fold.receive(call(f"e{i}", weights))
    for i, (own, cross) in enumerate(zip(stacks[1], stacks[2], strict=True)):
        fold.receive(call(f"d{i}", own))
        fold.receive(call(f"c{i}", cross))
    return fold


def test_rollout_equals_the_method_on_whole_stacks_and_yields_every_layer():
    stacks = attention()
    source, prefix = filled(FoldSettings(residual=0.3), row(1), stacks).streams()
    for layer in range(LAYERS):
        upper = [stacks[0], stacks[1][: layer + 1], stacks[2][: layer + 1]]
        expected = encoder_decoder_rollout(*upper, residual=0.3, cross_residual=0.3)
        torch.testing.assert_close(source.layers[layer], expected[0][:, 1])
        torch.testing.assert_close(prefix.layers[layer], expected[1][:, 1])
    torch.testing.assert_close(source.share + prefix.share, torch.ones(2, dtype=torch.float64))
    assert bool(prefix.causal.all())
    assert not bool(source.causal.any())


@pytest.mark.parametrize("layer", [0, -1])
def test_raw_attention_reads_the_rows_of_one_decoder_layer(layer):
    stacks = attention()
    settings = FoldSettings(method="raw_attention", layer=layer)
    source, prefix = filled(settings, row(2), stacks).streams()
    torch.testing.assert_close(source.final, stacks[2][layer].mean(1)[:, 2])
    torch.testing.assert_close(prefix.final, stacks[1][layer].mean(1)[:, 2])


def test_each_head_is_carried_over_everything_merged_below():
    stacks = attention()
    for head in range(3):
        settings = FoldSettings(method="per_head_rollout", head=head)
        source, prefix = filled(settings, row(1), stacks).streams()
        one = [stacks[2][0], stacks[2][1][:, [head] * 3]]
        expected = encoder_decoder_rollout(stacks[0], stacks[1], one)
        torch.testing.assert_close(source.final, expected[0][:, 1])
        torch.testing.assert_close(prefix.final, expected[1][:, 1])
    mean = filled(FoldSettings(method="per_head_rollout"), row(1), stacks).streams()[0]
    torch.testing.assert_close(mean.final, encoder_decoder_rollout(*stacks)[0][:, 1])
    assert float(mean.diagnostics["head_disagreement"].min()) > 0
    with pytest.raises(ConfigError, match="head = 7, but the layer has 3 heads"):
        filled(FoldSettings(method="per_head_rollout", head=7), row(1), stacks)


def test_flow_equals_networkx_on_the_graph_of_the_model():
    """The graph without the chains that carry the encoder's output past the decoder's layers."""
    stacks = [one.double() for one in attention(5)]
    source, prefix = filled(FoldSettings(method="attention_flow"), row(2), stacks).streams()
    mean = [one[:, 0].mean(1).numpy() for one in stacks]  # (layer, query, key) of the first sample
    graph = networkx.DiGraph()

    def edge(tail, head, capacity):
        if capacity > 0:
            graph.add_edge(tail, head, capacity=float(capacity))

    for layer in range(LAYERS):
        for i in range(SOURCE):
            for j in range(SOURCE):
                edge(("e", layer + 1, i), ("e", layer, j), 0.5 * mean[0][layer, i, j] + 0.5 * (i == j))
        for i in range(STEPS):
            for j in range(STEPS):
                edge(("m", layer, i), ("d", layer, j), 0.5 * mean[1][layer, i, j] + 0.5 * (i == j))
            edge(("d", layer + 1, i), ("m", layer, i), 0.5)
            for j in range(SOURCE):
                edge(("d", layer + 1, i), ("e", LAYERS, j), 0.5 * mean[2][layer, i, j])
    ends = [("e", 0, j) for j in range(SOURCE)] + [("d", 0, j) for j in range(STEPS)]
    flows = np.array([networkx.maximum_flow_value(graph, ("d", LAYERS, 2), end) for end in ends])
    found = torch.cat([source.final[0], prefix.final[0]]).numpy()
    np.testing.assert_allclose(found, flows / flows.sum(), atol=1e-8)
    rollout = filled(FoldSettings(), row(2), stacks).streams()
    assert (flows >= torch.cat([one.final[0] for one in rollout]).numpy() - 1e-9).all()


def published_fold():
    """Feed the published arrays as backward does: the last layer first, in blocks of queries."""
    layers = {n: PUBLISHED[f"encoder_decoder/{n}_attn"][:, None] for n in ("enc", "dec", "cross")}
    slopes = {n: PUBLISHED[f"encoder_decoder/{n}_grad"][:, None] for n in layers}
    depth, steps, source = len(layers["enc"]), layers["dec"].shape[-1], layers["enc"].shape[-1]
    masks = torch.ones(1, source).bool(), torch.ones(1, steps).bool()
    fold = RelevanceFold(plan(depth, depth), masks, torch.eye(steps)[:1])
    fold.order = [f"e{i}" for i in range(depth)] + [f"{k}{i}" for i in range(depth) for k in "dc"]
    fold.calls = len(fold.order)
    for index in reversed(range(fold.calls)):
        kind, layer = fold.order[index][0], int(fold.order[index][1:])
        name = {"e": "enc", "d": "dec", "c": "cross"}[kind]
        weights, slope = (torch.from_numpy(one[name][layer]) for one in (layers, slopes))
        fold.start_layer(index)
        for start in range(0, weights.shape[2], 2):
            fold.block(start, weights[:, :, start : start + 2], slope[:, :, start : start + 2])
        fold.finish_layer(index)
    return fold


def test_relevance_folded_from_the_last_layer_down_is_the_published_one():
    found = published_fold().relevances()
    for name, value in (
        ("relevance", found.first_second),
        ("relevance_encoder", found.second_second),
        ("relevance_decoder", found.first_first),
    ):
        expected = PUBLISHED[f"encoder_decoder/{name}"]
        np.testing.assert_allclose(value[0].numpy(), expected, rtol=1e-10, atol=1e-13)


def test_relevance_without_all_gradients_is_refused():
    fold = published_fold()
    fold.calls += 1
    with pytest.raises(CaptureError, match="gradients reached 9 of 10 attention layers"):
        fold.streams()


# --- two streams ------------------------------------------------------------------------------

TEXT, IMAGE = 3, 4
CO_LAYERS = (
    ("encoder.layer.0.attention.self", TEXT, TEXT),
    ("encoder.r_layers.0.attention.self", IMAGE, IMAGE),
    ("encoder.x_layers.0.visual_attention.att", TEXT, IMAGE),
    ("encoder.x_layers.0.visual_attention.att", IMAGE, TEXT),
    ("encoder.x_layers.0.lang_self_att.self", TEXT, TEXT),
    ("encoder.x_layers.0.visn_self_att.self", IMAGE, IMAGE),
)


def co_attention(settings, read):
    masks = torch.ones(1, TEXT).bool(), torch.ones(1, IMAGE).bool()
    fold, layers = CoFold(settings, masks, read), []
    for seed, (path, queries, keys) in enumerate(CO_LAYERS):
        weights = torch.from_numpy(random_attention(seed, 1, 1, 2, queries, keys=keys)[0])
        fold.receive(call(path, weights))
        layers.append(weights.mean(1)[0].numpy())
    return fold, layers


def test_rollout_of_two_streams_takes_both_directions_from_the_state_before_the_layer():
    text, image = co_attention(FoldSettings(), torch.eye(TEXT)[:1])[0].streams()
    own, other, there, back, text_after, _ = co_attention(FoldSettings(), torch.eye(TEXT)[:1])[1]
    half = lambda matrix: 0.5 * matrix + 0.5 * np.eye(len(matrix))  # noqa: E731
    below_text, below_image = half(own), half(other)
    tt, ti = 0.5 * below_text, 0.5 * there @ below_image
    tt, ti = half(text_after) @ tt, half(text_after) @ ti
    np.testing.assert_allclose(text.final[0], tt[0], atol=1e-12)
    np.testing.assert_allclose(image.final[0], ti[0], atol=1e-12)
    assert float(text.share + image.share) == pytest.approx(1)
    assert back.shape == (IMAGE, TEXT)


def test_raw_attention_of_two_streams_is_the_last_layer_that_crosses():
    fold, layers = co_attention(FoldSettings(method="raw_attention"), torch.eye(TEXT)[1:2])
    text, image = fold.streams()
    np.testing.assert_allclose(image.final[0], layers[2][1])
    np.testing.assert_allclose(text.final[0], layers[4][1])


def test_flow_of_two_streams_lies_above_their_rollout():
    read = torch.eye(TEXT)[:1]
    flow = co_attention(FoldSettings(method="attention_flow"), read)[0]
    raw = flow.joint.flow(torch.nn.functional.pad(read, (0, IMAGE)), 60.0)[0][0]
    rollout = torch.cat([one.final[0] for one in co_attention(FoldSettings(), read)[0].streams()])
    assert (raw >= rollout - 1e-9).all()
    text, image = flow.streams()
    assert float(text.share + image.share) == pytest.approx(1)


def test_layers_of_another_place_are_refused():
    with pytest.raises(CaptureError, match="is not known among two streams"):
        step_of("encoder.pooler.attention", 0)


# --- what runs where --------------------------------------------------------------------------


def test_refusals_name_methods_that_exist_and_leave_rollout_everywhere():
    for wiring, refused in REFUSED.items():
        assert "rollout" in methods_of(wiring)
        assert "gradient_rollout" in methods_of(wiring)
        for name, why in refused.items():
            assert "\n" not in why
            with pytest.raises(ConfigError, match=f"name = '{name}' is not available"):
                check_pair_settings(FoldSettings(method=name), wiring)


DOCUMENTED = re.findall(
    r"^\| `(\w+)` \| (yes|no)[^|]* \| (yes|no)[^|]* \| (yes|no)[^|]* \| (yes|no)[^|]* \|$",
    METHODS_PAGE.read_text(),
    re.MULTILINE,
)


@pytest.mark.parametrize(
    ("column", "wiring"), enumerate(["encoder-decoder", "towers", "co-attention", "joined"], start=1)
)
def test_the_page_on_methods_says_what_runs_where(column, wiring):
    said = {row[0] for row in DOCUMENTED if row[column] == "yes"}
    assert said & set(PARAMETERS) == set(methods_of(wiring))
    assert {row[0] for row in DOCUMENTED} >= set(PARAMETERS)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (FoldSettings(start_layer=1), "start_layer"),
        (FoldSettings(head_weights=((1.0,),)), "head_weights"),
        (FoldSettings(residual=(0.5, 0.4)), "residual"),
        (FoldSettings("per_head_rollout", same_head=True), "same_head"),
        (FoldSettings("gradient_rollout", form="product"), "form"),
    ],
)
def test_parameters_that_name_one_stack_are_refused_where_there_are_several_kinds(settings, named):
    with pytest.raises(ConfigError, match=rf"\[method\] {named} is not available for an encoder-decoder"):
        check_pair_settings(settings, "encoder-decoder")
    check_pair_settings(settings, "towers")


@pytest.mark.parametrize("wiring", ["encoder-decoder", "towers", "co-attention"])
def test_measured_residuals_are_there_for_rollout_alone(wiring):
    with pytest.raises(ConfigError, match=r"\[method\] residual is not available"):
        check_pair_settings(FoldSettings("attention_flow", residual="measured"), wiring)
    check_pair_settings(FoldSettings("rollout", residual="measured"), wiring)
