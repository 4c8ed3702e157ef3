"""Layers of their own make: XLNet, XLM, FSMT, I-BERT, WavLM against loops over queries and keys."""

from __future__ import annotations

import math
import threading

import pytest
import torch

from audit.capture.attention.hooks import hook_capture
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.mixing import check_mixing
from audit.capture.attention.passes import active_plan, exclusive, run_model
from audit.coverage.checks import examine
from audit.coverage.configs import build_model
from audit.errors import CaptureError
from tests.integration.test_capture_banded import captured, gradient_and_slope, heads_of

LENGTH = 7
IDS = torch.randint(4, 100, (2, LENGTH), generator=torch.Generator().manual_seed(5))
MASK = torch.ones_like(IDS)
MASK[1, -2:] = 0


def weights_of(query, keys, head_dim):
    """Return softmax(q · k / √d) over `keys` (key, head, dim) for one query (head, dim): (head, key)."""
    return torch.softmax((keys * query).sum(-1) / math.sqrt(head_dim), dim=0).T


@pytest.mark.parametrize("model_type", ["xlm", "flaubert", "ibert", "fsmt"])
@pytest.mark.parametrize("size", [2, LENGTH])
@torch.no_grad()
def test_returned_weights_are_those_of_a_loop_whatever_comes_first(model_type, size):
    """FSMT has positions first, probes second, which a batch as large as a probe is long could hide."""
    model = build_model(model_type, attention="eager")
    ids = IDS.repeat(4, 1)[:size]
    mask = MASK.repeat(4, 1)[:size]
    tensors = {"input_ids": ids, "attention_mask": mask}
    if model_type == "fsmt":
        tensors["decoder_input_ids"] = ids[:, :5]
    calls, hidden, modules = captured(model, tensors)
    names = {"ibert": ("query", "key", "value"), "fsmt": ("q_proj", "k_proj", "v_proj")}
    names = names.get(model_type, ("q_lin", "k_lin", "v_lin"))
    own = [path for path in calls if "decoder" not in path]
    assert len(own) == 2
    for path in own:
        module = modules[path]
        states = hidden[path].transpose(0, 1) if model_type == "fsmt" else hidden[path]
        projections = [module.get_submodule(name) for name in names]
        q, k, v = (
            heads_of(torch.nn.functional.linear(states, one.weight, one.bias), 4) for one in projections
        )
        for probe in range(size):
            keys = mask[probe].nonzero()[:, 0]
            for i in keys:
                row = calls[path].weights[probe, :, i]
                expected = weights_of(q[probe, i], k[probe, keys], q.shape[-1])
                assert row[:, keys] == pytest.approx(expected.numpy(), abs=1e-6)
                assert row.sum(-1) == pytest.approx(1, abs=1e-5)
                mixed = torch.einsum("hk,khd->hd", expected, v[probe, keys])
                assert calls[path].output[probe, i] == pytest.approx(mixed.numpy(), abs=1e-5)


@torch.no_grad()
def test_xlnet_is_a_loop_over_contents_and_distances():
    model = build_model("xlnet", attention="eager")
    tensors = {"input_ids": IDS, "attention_mask": MASK}
    distances = []
    hook = model.layer[0].rel_attn.register_forward_pre_hook(
        lambda _m, args, kwargs: distances.append(args[4] if len(args) > 4 else kwargs["r"]), with_kwargs=True
    )
    calls, hidden, modules = captured(model, tensors)
    hook.remove()
    assert len(calls) == 2
    for path, call in calls.items():
        module, states = modules[path], hidden[path]
        q, k, v = (torch.einsum("ibh,hnd->bind", states, one) for one in (module.q, module.k, module.v))
        r = torch.einsum("ibh,hnd->ind", distances[0][:, :1], module.r)
        for probe in range(2):
            for i in MASK[probe].nonzero()[:, 0].tolist():
                keys = [j for j in range(LENGTH) if MASK[probe, j]]
                query, far = q[probe, i], r[[LENGTH - i + j for j in keys]]
                scores = (k[probe, keys] * (query + module.r_w_bias)).sum(-1)
                scores = (scores + (far * (query + module.r_r_bias)).sum(-1)) * module.scale
                expected = torch.softmax(scores, dim=0).T
                assert call.weights[probe, :, i, keys] == pytest.approx(expected.numpy(), abs=1e-6)
                assert call.weights[probe, :, i].sum(-1) == pytest.approx(1, abs=1e-5)
                mixed = torch.einsum("hk,khd->hd", expected, v[probe, keys])
                assert call.output[probe, i] == pytest.approx(mixed.numpy(), abs=1e-5)


def test_xlnet_is_left_as_it_was_and_other_threads_see_the_kernel_alone():
    model = build_model("xlnet", attention="eager")
    layer, calls, thread = model.layer[0].rel_attn, [], None

    def other():
        run_model(model, {"input_ids": IDS}, attentions=True)

    with hook_capture({"layer": layer}, calls.append):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert calls == []
        with exclusive(model):
            run_model(model, {"input_ids": IDS}, attentions=True)
    assert len(calls) == 1
    assert "rel_attn_core" not in vars(layer)


@pytest.mark.parametrize("model_type", ["xlnet", "wavlm"])
def test_gradients_of_weights_that_are_a_copy_are_finite_differences(model_type):
    model = build_model(model_type, attention="eager").double()
    tensors = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}
    if model_type == "wavlm":
        tensors = {"input_values": torch.randn(1, 800, generator=torch.Generator().manual_seed(2)).double()}
    gradient, slope = gradient_and_slope(model, tensors, size=1e-4)
    assert slope == pytest.approx(gradient, rel=1e-4)


def test_mixing_beside_the_lists_of_xlm_is_noticed():
    """XLM's blocks lie in four lists: a leak in one of the other three must not pass."""
    model = build_model("xlm", attention="eager")
    tensors = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}
    plan = active_plan(model, plan_capture(model), tensors)
    check_mixing(model, plan, tensors, LENGTH)
    model.ffns[1].register_forward_hook(lambda _m, _args, output: output + output.roll(1, dims=1))
    with pytest.raises(CaptureError, match="positions mix outside the captured attention in attentions"):
        check_mixing(model, plan, tensors, LENGTH)


@pytest.mark.parametrize("model_type", ["pegasus_x"])
def test_global_tokens_that_are_no_positions_are_refused(model_type):
    found = examine(model_type)
    assert (found.status, "global tokens that are no positions" in found.reason) == ("refused", True)
