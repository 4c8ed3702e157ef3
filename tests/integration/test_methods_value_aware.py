"""Value-aware methods against slow loops over the equations, from weights read off the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from audit.capture import capture
from audit.capture.attention.layers import plan_capture
from audit.capture.engines import contributions as engine
from audit.capture.engines.blocks import find_blocks
from audit.errors import CaptureError
from audit.methods import attention_rollout
from audit.methods.rollout import measured_residual
from audit.records import Checkpoint, Method
from tests import reference
from tests.integration.test_capture_families import ROWS, family_checkpoint, family_probes, read_weights
from tests.integration.test_methods_gradient import encode
from tests.integration.tiny_models import (
    TEXT_FAMILIES,
    build,
    checkpoint,
    text_checkpoint,
    text_probes,
    word_tokenizer,
)

Array = NDArray[np.float64]
POST = ("bert", "roberta", "electra", "distilbert")
PRE = ("vit", "gpt2", "llama", "dinov2")


def shaken(family: str, attention: str = "sdpa") -> Checkpoint:
    """A checkpoint in float64 whose biases, norms and layer scales are not 0 and 1."""
    subject = family_checkpoint(family, attention)
    generator = torch.Generator().manual_seed(1)
    subject.model.double()
    with torch.no_grad():
        for parameter in subject.model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return subject


def numpy(tensor: torch.Tensor) -> Array:
    return tensor.detach().double().numpy()


def slow_layers(subject: Checkpoint, tensors: Any, family: str) -> list[dict[str, Array]]:
    """T_i(x_j) of every layer by loops, from the hidden states and the parameters of the family."""
    with torch.no_grad():
        outputs = subject.model(**tensors, output_attentions=True, output_hidden_states=True)
    heads = outputs.attentions[0].shape[1]
    found = []
    for index, attention in enumerate(outputs.attentions):
        parts = PARTS[family](subject.model, index)
        hidden = outputs.hidden_states[index]
        with torch.no_grad():
            taken = hidden if parts.get("before") is None else parts["before"](hidden)
            values = parts["value"](taken)[0]
        n, key_heads = len(values), values.shape[-1] * heads // parts["weight"].shape[1]
        split = values.reshape(n, key_heads, -1).transpose(0, 1).repeat_interleave(heads // key_heads, 0)
        weight = parts["weight"].T.reshape(heads, -1, hidden.shape[-1])
        if parts.get("scale") is not None:
            weight = weight * parts["scale"]
        vectors = reference.transformed(numpy(attention[0]), numpy(split), numpy(weight), numpy(hidden[0]))
        found.append(
            {"vectors": vectors, "parts": parts, "after": numpy(outputs.hidden_states[index + 1][0])}
        )
    return found


def linear(module: Any) -> dict[str, Any]:
    weight = module.weight if isinstance(module, torch.nn.Linear) else module.weight.T
    return {"weight": weight, "bias": module.bias}


def bert(model: Any, index: int) -> dict[str, Any]:
    layer = model.base_model.encoder.layer[index]
    output = layer.attention.output
    return {
        "value": layer.attention.self.value, **linear(output.dense), "norm": output.LayerNorm,
        "second": layer.output.LayerNorm, "ffn": lambda z: layer.output.dense(layer.intermediate(z)),
    }  # fmt: skip


def distilbert(model: Any, index: int) -> dict[str, Any]:
    layer = model.distilbert.transformer.layer[index]
    return {
        "value": layer.attention.v_lin, **linear(layer.attention.out_lin), "norm": layer.sa_layer_norm,
        "second": layer.output_layer_norm, "ffn": layer.ffn,
    }  # fmt: skip


def vit(model: Any, index: int) -> dict[str, Any]:
    layer = model.vit.layers[index]
    return {
        "before": layer.layernorm_before,
        "value": layer.attention.v_proj,
        **linear(layer.attention.o_proj),
    }


def dinov2(model: Any, index: int) -> dict[str, Any]:
    layer = model.dinov2.encoder.layer[index]
    found = {"before": layer.norm1, "value": layer.attention.v_proj, **linear(layer.attention.o_proj)}
    return {**found, "scale": layer.layer_scale1.lambda1}


def gpt2(model: Any, index: int) -> dict[str, Any]:
    layer = model.transformer.h[index]
    return {
        "before": layer.ln_1, "value": lambda x: layer.attn.c_attn(x).chunk(3, dim=-1)[2],
        **linear(layer.attn.c_proj),
    }  # fmt: skip


def llama(model: Any, index: int) -> dict[str, Any]:
    layer = model.model.layers[index]
    return {
        "before": layer.input_layernorm,
        "value": layer.self_attn.v_proj,
        **linear(layer.self_attn.o_proj),
    }


PARTS = {
    "bert": bert, "roberta": bert, "electra": bert, "distilbert": distilbert,
    "vit": vit, "dinov2": dinov2, "gpt2": gpt2, "llama": llama,
}  # fmt: skip


def standardized(vectors: Array, total: Array, norm: Any) -> Array:
    """γ ⊙ (z − mean z)/σ of every vector, with the σ of `total` (query, dim)."""
    out = np.zeros_like(vectors)
    gamma = numpy(norm.weight)
    for i in range(len(vectors)):
        sigma = np.sqrt(total[i].var() + norm.eps)
        for j in range(vectors.shape[1]):
            out[i, j] = gamma * (vectors[i, j] - vectors[i, j].mean()) / sigma
    return out


def slow_matrix(layer: dict[str, Any], method: str) -> Array:
    """One layer's contributions, each row divided by its sum."""
    vectors, parts = layer["vectors"], layer["parts"]
    bias = 0.0 if parts["bias"] is None else numpy(parts["bias"])
    bias = bias * numpy(parts["scale"]) if parts.get("scale") is not None else bias
    total = vectors.sum(1) + bias
    if parts.get("norm") is not None:
        vectors = standardized(vectors, total, parts["norm"])
        with torch.no_grad():
            normed = parts["norm"](torch.tensor(total))
            summed = normed + parts["ffn"](normed[None])[0]
        if method == "globenc":
            vectors = standardized(vectors, summed.numpy(), parts["second"])
        np.testing.assert_allclose(parts["second"](summed).detach(), layer["after"], atol=1e-9)
        total = normed.numpy()
    n = len(vectors)
    rows = np.zeros((n, n))
    for i in range(n):
        if method == "alti":
            size = np.abs(total[i]).sum()
            rows[i] = [max(0.0, size - np.abs(total[i] - vectors[i, j]).sum()) for j in range(n)]
        else:
            rows[i] = [np.sqrt((vectors[i, j] ** 2).sum()) for j in range(n)]
        rows[i] = rows[i] / rows[i].sum() if rows[i].sum() else np.eye(n)[i]
    return rows


def rolled(matrices: list[Array], read: Array) -> Array:
    R, rows = np.eye(len(read)), []
    for matrix in matrices:
        R = matrix @ R
        rows.append(read @ R)
    return np.array(rows)


CASES = [(f, m) for f in (*POST, *PRE) for m in ("norms", "alti", "globenc") if f in POST or m != "globenc"]


@pytest.mark.parametrize(("family", "method"), CASES)
def test_contributions_equal_the_slow_loops_in_every_layer(family: str, method: str) -> None:
    subject, slow = shaken(family), shaken(family, "eager")
    probes = family_probes(family)[:2]
    for probe, found in zip(probes, capture(subject, probes, method=Method(method)), strict=True):
        item = encode(slow, probe)
        special = 0 if family in TEXT_FAMILIES else 1
        read = read_weights(ROWS.get(family, "cls"), len(item), special)
        tensors = {k: v.double() if v.is_floating_point() else v for k, v in item.tensors.items()}
        matrices = [slow_matrix(layer, method) for layer in slow_layers(slow, tensors, family)]
        np.testing.assert_allclose(found.maps[0].layers, rolled(matrices, read), atol=1e-6)
        plain = next(iter(capture(subject, [probe]))).maps[0].weights
        assert np.abs(plain - found.maps[0].weights).max() > 0.01


def test_globenc_differs_from_norms_where_the_second_norm_weighs_dimensions() -> None:
    subject, probes = shaken("bert"), text_probes()[:1]
    norms, globenc = (
        next(iter(capture(subject, probes, method=Method(m)))).maps[0] for m in ("norms", "globenc")
    )
    assert np.abs(norms.weights - globenc.weights).max() > 1e-3


@pytest.mark.parametrize("method", ["norms", "alti", "globenc", "value_zeroing"])
def test_blocks_of_queries_or_keys_change_nothing(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, probes = shaken("bert"), text_probes()
    whole = list(capture(subject, probes, method=Method(method)))
    monkeypatch.setattr(engine, "BLOCK_ENTRIES", 3 * 14 * 32)
    for a, b in zip(whole, capture(subject, probes, method=Method(method)), strict=True):
        np.testing.assert_allclose(a.maps[0].layers, b.maps[0].layers, atol=1e-7)


@pytest.mark.parametrize("family", ["bert", "distilbert", "vit", "llama"])
def test_value_zeroing_equals_running_each_layer_without_each_value(family: str) -> None:
    """The slow way: subtract what the key's value added to the context, and go on through the layer."""
    subject, slow = shaken(family), shaken(family, "eager")
    probe = family_probes(family)[0]
    (found,) = capture(subject, [probe], method=Method("value_zeroing"))
    item = encode(slow, probe)
    tensors = {k: v.double() if v.is_floating_point() else v for k, v in item.tensors.items()}
    n = len(item)
    read = read_weights(ROWS.get(family, "cls"), n, 0 if family in TEXT_FAMILIES else 1)
    matrices = []
    for index, layer in enumerate(slow_layers(slow, tensors, family)):
        vectors, parts = layer["vectors"], layer["parts"]
        bias = 0.0 if parts["bias"] is None else numpy(parts["bias"])
        total = vectors.sum(1) + bias
        with torch.no_grad():
            hidden = slow.model(**tensors, output_hidden_states=True).hidden_states[index][0]
            rows = np.zeros((n, n))
            for i in range(n):
                whole = rest(slow, family, index, torch.tensor(total[i]))
                for j in range(n):
                    added = vectors[i, j] - (hidden[i].numpy() if i == j else 0.0)
                    without = rest(slow, family, index, torch.tensor(total[i] - added))
                    rows[i, j] = 1 - float(torch.cosine_similarity(whole, without, dim=0))
        matrices.append(rows / rows.sum(1, keepdims=True))
    np.testing.assert_allclose(found.maps[0].layers, rolled(matrices, read), atol=1e-6)


def rest(subject: Checkpoint, family: str, index: int, summed: torch.Tensor) -> torch.Tensor:
    """What a layer makes of the sum of residual and attention at one position."""
    if family in POST:
        parts = PARTS[family](subject.model, index)
        normed = parts["norm"](summed[None, None])
        return parts["second"](normed + parts["ffn"](normed))[0, 0]
    if family == "vit":
        layer = subject.model.vit.layers[index]
        return (summed + layer.mlp(layer.layernorm_after(summed[None, None])))[0, 0]
    layer = subject.model.model.layers[index]
    return (summed + layer.mlp(layer.post_attention_layernorm(summed[None, None])))[0, 0]


@pytest.mark.parametrize("family", [*POST, *PRE, "deberta-v2"])
def test_measured_residual_is_the_ratio_of_the_layers_own_norms(family: str) -> None:
    subject = family_checkpoint(family)
    probe = family_probes(family)[1]
    (found,) = capture(subject, [probe], method=Method("rollout", params={"residual": "measured"}))
    item = encode(subject, probe)
    blocks = find_blocks(subject.model, plan_capture(subject.model), dict(item.tensors))
    norms: dict[str, list[torch.Tensor]] = {}
    modules = dict(subject.model.named_modules())
    for path, block in blocks.items():
        ends = [(block.layer, False), (block.scale or block.projection, True)]
        for name, output in ends:

            def keep(_m: Any, args: Any, given: Any, path: str = path, output: bool = output) -> None:
                norms.setdefault(path, []).append(given if output else args[0])

            modules[name].register_forward_hook(keep)
    with torch.no_grad():
        attentions = subject.model(**item.tensors, output_attentions=True).attentions
    rho = torch.stack([measured_residual(norms[path][1], norms[path][0]) for path in blocks])
    matrix = attention_rollout(attentions, residual=rho)[0].numpy()
    read = read_weights(ROWS.get(family, "cls"), len(item), 0 if family in TEXT_FAMILIES else 1)
    np.testing.assert_allclose(found.maps[0].weights, read @ matrix, atol=1e-5)
    assert 0.05 < float(rho.min()) < float(rho.max()) < 0.999


def test_a_layer_that_adds_something_else_is_refused() -> None:
    subject = text_checkpoint("bert", attention="sdpa")
    norm = subject.model.bert.encoder.layer[1].attention.output.LayerNorm
    norm.register_forward_hook(lambda _m, _a, out: out + 0.05)
    with pytest.raises(CaptureError, match=r"layer.1.attention.self: what its positions add differs"):
        list(capture(subject, text_probes(), method=Method("alti")))


def test_layers_without_the_second_norm_refuse_globenc() -> None:
    with pytest.raises(CaptureError, match="globenc would be norms; use the method norms"):
        list(capture(family_checkpoint("vit"), family_probes("vit"), method=Method("globenc")))


def test_parallel_blocks_are_refused_by_layer() -> None:
    tokenizer = word_tokenizer()
    subject = checkpoint(
        build("PhiForCausalLM", vocab_size=len(tokenizer), pad_token_id=0, num_key_value_heads=4), tokenizer
    )
    for method in (
        Method("alti"),
        Method("rollout", params={"residual": "measured"}),
        Method("value_zeroing"),
    ):
        with pytest.raises(
            CaptureError, match=r"model.layers.0.self_attn \(PhiAttention\): no norm takes the sum"
        ):
            list(capture(subject, text_probes(), method=method))
    assert len(list(capture(subject, text_probes(), method=Method("gradient_rollout")))) == len(text_probes())


def test_layers_that_join_batch_and_position_are_split_all_the_same() -> None:
    tokenizer = word_tokenizer()
    sizes = {"ffn_dim": 37, "word_embed_proj_dim": 32, "pad_token_id": 0}
    subject = checkpoint(build("OPTForCausalLM", vocab_size=len(tokenizer), **sizes), tokenizer)
    for name in ("norms", "alti", "value_zeroing"):  # the parts are checked against the layer's output
        assert len(list(capture(subject, text_probes(), method=Method(name)))) == len(text_probes())


def test_values_off_the_interface_cannot_be_zeroed() -> None:
    subject = family_checkpoint("deberta-v2")
    with pytest.raises(CaptureError, match="not on the attention interface, so its values cannot be zeroed"):
        list(capture(subject, text_probes(), method=Method("value_zeroing")))
