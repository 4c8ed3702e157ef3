"""Attributions where a table of embeddings gets transposed ids (XLNet), or padded (Longformer, BigBird)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import XLNetConfig, XLNetForSequenceClassification

from audit.capture import capture
from audit.capture.attributions.attribution import _input_x_gradient
from audit.capture.attributions.embedded import check_own, embedded, placed
from audit.capture.attributions.question import differentiable
from audit.errors import CaptureError
from audit.records import Method, Probe
from tests.integration.tiny_models import LABELS, TEXTS, build, checkpoint, word_tokenizer
from tests.toy_models import Toy, toy_question

IDS = torch.tensor([[2, 7, 9, 3]])
GIVEN = torch.arange(8.0).reshape(1, 4, 2)
PROBE = Probe("p", text=" ".join(" ".join(TEXTS).split()[:-1]))


def subject(family: str):
    """A model that changes the ids inside, whose blocks and windows the probe's tokens do not fill."""
    tokenizer = word_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": 0, **LABELS}
    if family == "XLNet":  # which takes no limit of length
        torch.manual_seed(0)
        config = XLNetConfig(d_model=16, n_layer=2, n_head=2, d_inner=32, dropout=0.0, **sizes)
        model = XLNetForSequenceClassification(config)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.3)
        return checkpoint(model.double(), tokenizer)
    own = {
        "Longformer": {"attention_window": [4, 4, 4], "sep_token_id": 3, "max_position_embeddings": 66},
        "BigBird": {"block_size": 2, "num_random_blocks": 1, "hidden_act": "gelu"},
    }
    model = build(f"{family}ForSequenceClassification", **{**sizes, **own[family]})
    return checkpoint(model.double(), tokenizer)


def encoded(ck) -> dict[str, torch.Tensor]:
    return dict(ck.processor([PROBE.text], return_tensors="pt"))


@pytest.mark.parametrize("family", ["XLNet", "Longformer", "BigBird"])
def test_input_x_gradient_is_the_finite_difference_along_each_embedding(family):
    ck = subject(family)
    (one,) = capture(ck, [PROBE], method=Method(name="input_x_gradient"), target=1)
    tensors = encoded(ck)
    ids = tensors.pop("input_ids")
    assert ids.shape[1] % 2 == 1  # no multiple of a block of 2 or a window of 4
    if family == "Longformer":  # the head marks the first token where it is given ids
        tensors["global_attention_mask"] = torch.zeros_like(ids).index_fill(1, torch.tensor([0]), 1)
    base, slopes = ck.model.get_input_embeddings()(ids).detach().requires_grad_(), []
    (gradient,) = torch.autograd.grad(ck.model(**tensors, inputs_embeds=base).logits[0, 1], base)
    exact = (base * gradient).sum(dim=-1).abs().detach()[0]
    assert one.maps[0].weights == pytest.approx((exact / exact.sum()).numpy(), abs=1e-6)
    with torch.no_grad():
        for i in range(ids.shape[1]):
            ends = []
            for factor in (1 + 1e-4, 1 - 1e-4):
                moved = base.clone()
                moved[0, i] *= factor
                ends.append(float(ck.model(**tensors, inputs_embeds=moved).logits[0, 1]))
            slopes.append(abs(ends[0] - ends[1]))
    expected = np.array(slopes) / sum(slopes)
    rough = 2e-3 if family == "Longformer" else 1e-5  # its softmax is in float32
    assert one.maps[0].weights == pytest.approx(expected, abs=rough)


@pytest.mark.parametrize("family", ["XLNet", "Longformer", "BigBird"])
def test_grad_cam_at_the_first_layer_is_the_formula_on_what_it_takes(family):
    ck = subject(family)
    (one,) = capture(ck, [PROBE], method=Method("grad_cam", params={"layer": 0}), target=1)
    kept, tensors = [], encoded(ck)
    source = ck.model.transformer.word_embedding if family == "XLNet" else ck.model.base_model.embeddings
    hook = source.register_forward_hook(lambda _m, _a, out: (out.retain_grad(), kept.append(out))[1])
    ck.model(**tensors).logits[0, 1].backward()
    hook.remove()
    length = tensors["input_ids"].shape[1]
    rows, slopes = (x.detach().flatten(0, 1)[:length] for x in (kept[0], kept[0].grad))
    found = (rows @ slopes.mean(dim=0)).clamp_min(0)
    assert found.sum() > 0
    assert one.maps[0].weights == pytest.approx((found / found.sum()).numpy(), abs=1e-6)


@pytest.mark.parametrize("family", ["XLNet", "Longformer", "BigBird"])
@pytest.mark.parametrize("method", ["lrp", "integrated_gradients"])
def test_sums_that_must_hold_hold_where_ids_are_changed_inside(family, method):
    (one,) = capture(subject(family), [PROBE], method=Method(name=method), target=1)
    assert one.maps[0].weights.sum() == pytest.approx(1)
    (error,) = (value for name, value in one.maps[0].diagnostics.items() if name.endswith("_error"))
    assert 0 <= error < (1e-6 if method == "lrp" else 0.05)


# --- where embeddings are put -----------------------------------------------------------------


def test_embeddings_are_put_where_the_table_was_called():
    own = torch.full((1, 6, 2), -1.0)
    pad = torch.tensor([[0, 0]])
    assert torch.equal(placed(GIVEN, IDS, IDS, own[:, :4]), GIVEN)
    assert torch.equal(placed(GIVEN, IDS, IDS.T, own[:, :4].transpose(0, 1)), GIVEN.transpose(0, 1))
    right = placed(GIVEN, IDS, torch.cat([IDS, pad], 1), own)
    assert torch.equal(right, torch.cat([GIVEN, own[:, :2]], 1))
    left = placed(GIVEN, IDS, torch.cat([pad, IDS], 1), own)
    assert torch.equal(left, torch.cat([own[:, :2], GIVEN], 1))
    middle = torch.cat([IDS[:, :2], pad, IDS[:, 2:]], 1)
    assert placed(GIVEN, IDS, middle, own) is None
    assert placed(GIVEN, IDS, IDS[:, :3], own[:, :3]) is None


def test_as_many_copies_as_positions_are_transposed_all_the_same():
    ids, given = IDS.expand(4, -1), torch.arange(32.0).reshape(4, 4, 2)
    assert torch.equal(placed(given, ids, ids.T, torch.zeros(4, 4, 2)), given.transpose(0, 1))
    assert torch.equal(placed(given, ids, ids, torch.zeros(4, 4, 2)), given)


def test_a_model_may_add_to_its_embeddings_in_place():
    table, leaf = torch.nn.Embedding(10, 2), GIVEN.clone().requires_grad_()
    with embedded(table, leaf, IDS):
        table(IDS).add_(1).sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(GIVEN))
    assert torch.equal(leaf.detach(), GIVEN)


def test_padding_that_is_embedded_by_itself_is_left_and_other_tokens_are_refused():
    table, pad = torch.nn.Embedding(10, 2, padding_idx=0), torch.zeros(1, 2, dtype=torch.int64)
    with embedded(table, GIVEN, IDS):
        assert torch.equal(table(IDS), GIVEN)
        assert torch.equal(table(pad), torch.zeros(1, 2, 2))
        with pytest.raises(CaptureError, match=r"with \(1, 2\) for tokens of shape \(1, 4\)"):
            table(IDS[:, :2])


def test_a_table_that_is_never_called_for_the_tokens_is_refused():
    table = torch.nn.Embedding(10, 2)
    said = r"calls its table of embeddings with nothing for tokens of shape \(1, 4\).*use occlusion"
    with pytest.raises(CaptureError, match=said), embedded(table, GIVEN, IDS):
        pass
    said = r"with \(1,\) for tokens of shape \(1, 4\)"
    with pytest.raises(CaptureError, match=said), embedded(table, GIVEN, IDS, others=True):
        table(torch.tensor([5]))


# --- the logit that is explained --------------------------------------------------------------


class Altered(Toy):
    """Calls its table with other ids than it was given."""

    def __init__(self, alter) -> None:
        super().__init__(lambda e: (e * torch.arange(1.0, 1 + e.shape[1])[:, None]).sum(dim=(1, 2)))
        self.alter = alter

    def forward(self, input_ids):
        return super().forward(self.alter(input_ids))


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda ids: ids[:, ::2], r"with \(1, 3\) for tokens of shape \(1, 6\)"),
        (lambda ids: ids.flip(1), "the target logit is .* as a function of its inputs but"),
        (lambda ids: ids.reshape(3, 2), r"with \(3, 2\) for tokens of shape \(1, 6\)"),
    ],
)
def test_a_model_whose_own_logit_is_another_is_refused(alter, said):
    question = toy_question(Altered(alter), [2, 7, 9, 11, 13, 3], special=(0, 5))
    with pytest.raises(CaptureError, match=said):
        _input_x_gradient(question)


def test_the_function_of_the_leaf_gives_the_models_own_logit():
    question = toy_question(Altered(lambda ids: ids), [2, 7, 9, 11, 13, 3], special=(0, 5))
    leaf, _, forward, others = differentiable(question)
    assert float(forward(leaf, *others).detach()) == pytest.approx(question.own()[0], rel=1e-12)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 2e-3), (torch.bfloat16, 0.1)])
def test_the_own_logit_is_compared_at_the_precision_of_the_model(dtype, off):
    check_own("p", torch.tensor([1 + off / 4]), 1.0, 1.0, dtype)
    with pytest.raises(CaptureError, match="would explain something else"):
        check_own("p", torch.tensor([1 + off]), 1.0, 1.0, dtype)
    with pytest.raises(CaptureError, match="gives 3 target logits for 1 of its inputs"):
        check_own("p", torch.ones(3), 1.0, 1.0, dtype)
    with pytest.raises(CaptureError, match="target logit is nan"):
        check_own("p", torch.tensor([float("nan")]), 1.0, 1.0, dtype)
