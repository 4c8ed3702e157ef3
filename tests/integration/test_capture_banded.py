"""Attention within bands and blocks: the whole matrix against loops over queries, keys and masks."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from audit.capture import capture
from audit.capture.attention.hooks import hook_capture
from audit.capture.attention.layers import plan_capture
from audit.capture.attention.passes import active_plan, exclusive, run_model, watched
from audit.capture.engines.gradient import gradient_leaf
from audit.capture.inputs import batches
from audit.coverage.configs import build_model, model_class, tiny_config
from audit.errors import CaptureError
from audit.records import Method, Probe
from tests.integration.tiny_models import LABELS, TEXTS, build, text_probes, word_tokenizer
from tests.integration.tiny_models import checkpoint as as_checkpoint

LENGTH = 27  # no multiple of a window or block
IDS = torch.randint(4, 100, (2, LENGTH), generator=torch.Generator().manual_seed(3))
MASK = torch.ones_like(IDS)
MASK[1, -4:] = 0


@contextmanager
def kept_inputs(layers):
    """Keep what each layer takes first."""
    hidden, hooks = {}, []
    for path, module in layers.items():

        def keep(_module, args, kwargs, path=path):
            hidden.setdefault(path, [*args, *kwargs.values()][0])

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    yield hidden
    for hook in hooks:
        hook.remove()


def captured(model, tensors):
    """Return the call of each layer, what it took, and all modules."""
    plan, calls = active_plan(model, plan_capture(model), tensors), {}

    def receive(call):
        calls[call.path] = call

    with exclusive(model, plan.configs), kept_inputs(plan.modules()) as hidden, watched(plan, receive, None):
        run_model(model, tensors, attentions=True)
    return calls, hidden, dict(model.named_modules())


def attention(scores, values, keys):
    """Return the weights over all positions and the output of one query, for each head.

    Keys may come more than once; `scores` (key, head) and `values` (key, head, dim).
    """
    weights = torch.softmax(scores, dim=0)
    total = torch.zeros(LENGTH, scores.shape[1]).index_add(0, torch.tensor(keys), weights)
    return total.T, (weights[..., None] * values).sum(dim=0)


def assert_row(call, batch, query, expected):
    weights, output = expected
    assert call.weights.shape[2:] == (LENGTH, LENGTH)
    assert call.weights[batch, :, query] == pytest.approx(weights.numpy(), abs=1e-6)
    assert call.weights[batch, :, query].sum(-1) == pytest.approx(1, abs=1e-5)
    assert call.output[batch, query] == pytest.approx(output.numpy(), abs=1e-5)


def heads_of(states, heads):
    return states.unflatten(-1, (heads, -1))


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["longformer", "led"])
@pytest.mark.parametrize("globals_", [[], [[0], [0, 5, 20]]])
def test_sliding_window_with_global_positions_is_the_matrix_of_a_loop(model_type, globals_):
    model = build_model(model_type, attention="eager")
    tensors = {"input_ids": IDS, "attention_mask": MASK}
    if globals_:
        marked = torch.zeros_like(IDS)
        for row, at in enumerate(globals_):
            marked[row, at] = 1
        tensors["global_attention_mask"] = marked
    if model_type == "led":
        tensors["decoder_input_ids"] = IDS[:, :5]
    calls, hidden, modules = captured(model, tensors)
    banded = [path for path in calls if type(modules[path]).__name__.endswith("SelfAttention")]
    assert len(banded) == 2
    for path in banded:
        module, states = modules[path], hidden[path]
        h, side = module.num_heads, module.one_sided_attn_window_size
        local = [heads_of(layer(states), h) for layer in (module.query, module.key, module.value)]
        far = [
            heads_of(layer(states), h)
            for layer in (module.query_global, module.key_global, module.value_global)
        ]
        for batch in range(2):
            chosen = set(globals_[batch]) if globals_ else set()
            valid = [j for j in range(LENGTH) if MASK[batch, j]]
            for i in valid:
                q, k, v = far if i in chosen else local
                near = [j for j in valid if abs(i - j) <= side or j in chosen]
                keys = valid if i in chosen else near
                scores = (k[batch, keys] * q[batch, i]).sum(-1) / math.sqrt(module.head_dim)
                assert_row(calls[path], batch, i, attention(scores, v[batch, keys], keys))


def keys_of_block(block, blocks, random_blocks):
    """Return the blocks of keys of a block of queries, as often as BigBird attends to each (eval mode)."""
    last = blocks - 1
    if block in (0, last):
        return list(range(blocks))
    if block == 1:
        return [0, 1, 2, last, *[0] * random_blocks]
    if block == last - 1:
        return [0, last - 2, last - 1, last, *[0] * random_blocks]
    return [0, block - 1, block, block + 1, last, *[0] * random_blocks]


@torch.no_grad()
@pytest.mark.parametrize("model_type", ["big_bird", "bigbird_pegasus"])
def test_block_sparse_attention_is_the_matrix_of_a_loop(model_type):
    model = build_model(model_type, attention="eager")
    tensors = {"input_ids": IDS, "attention_mask": MASK}
    if model_type == "bigbird_pegasus":
        tensors["decoder_input_ids"] = IDS[:, :5]
    calls, hidden, modules = captured(model, tensors)
    sparse = [path for path in calls if "BlockSparse" in type(modules[path]).__name__]
    assert len(sparse) == 2
    for path in sparse:
        module, states = modules[path], hidden[path]
        h, size = module.num_attention_heads, module.block_size
        blocks = states.shape[1] // size
        assert blocks * size > LENGTH
        q, k, v = (heads_of(layer(states), h) for layer in (module.query, module.key, module.value))
        for batch in range(2):
            valid = [j for j in range(LENGTH) if MASK[batch, j]]
            for i in valid:
                near = keys_of_block(i // size, blocks, module.num_random_blocks)
                keys = [j for b in near for j in range(b * size, (b + 1) * size) if j in valid]
                scores = (k[batch, keys] * q[batch, i]).sum(-1) / math.sqrt(module.attention_head_size)
                assert_row(calls[path], batch, i, attention(scores, v[batch, keys], keys))


@torch.no_grad()
def test_local_blocks_are_the_matrix_of_a_loop():
    model = build_model("longt5", attention="eager")
    tensors = {"input_ids": IDS, "attention_mask": MASK, "decoder_input_ids": IDS[:, :5]}
    calls, hidden, modules = captured(model, tensors)
    local = [path for path in calls if type(modules[path]).__name__ == "LongT5LocalAttention"]
    assert len(local) == 2
    table = modules[local[0]].relative_attention_bias.weight
    for path in local:
        module, states = modules[path], hidden[path]
        assert module.block_len < LENGTH
        q, k, v = (heads_of(layer(states), module.n_heads) for layer in (module.q, module.k, module.v))
        bucket = modules[local[0]]._relative_position_bucket(
            torch.arange(LENGTH)[None, :] - torch.arange(LENGTH)[:, None],
            num_buckets=module.relative_attention_num_buckets,
            max_distance=module.relative_attention_max_distance,
        )
        for batch in range(2):
            valid = [j for j in range(LENGTH) if MASK[batch, j]]
            for i in valid:
                keys = [j for j in valid if abs(i - j) < module.block_len]
                scores = (k[batch, keys] * q[batch, i]).sum(-1) + table[bucket[i, keys]]
                assert_row(calls[path], batch, i, attention(scores, v[batch, keys], keys))


def change_of(module, call, states, step, rows):
    """Return what a layer gives when its matrix is changed by `step`; `rows` have other values."""
    if call.value is not None:
        change = (step @ call.value).transpose(1, 2)
        if call.returned is None:
            return call.output + change
        name = call.projection or ("out_proj" if hasattr(module, "out_proj") else "")
        return call.returned + module.get_submodule(name)(change.flatten(2))
    n = step.shape[-1]
    change = (step @ heads_of(module.value(states), 4).transpose(1, 2)[:, :, :n]).transpose(1, 2)
    if rows:
        far = (step @ heads_of(module.value_global(states), 4).transpose(1, 2)[:, :, :n]).transpose(1, 2)
        change[:, rows] = far[:, rows]
    return call.returned + torch.nn.functional.pad(change.flatten(2), (0, 0, 0, states.shape[1] - n))


def gradient_and_slope(model, tensors, *, size, rows=()):
    """Return the slope along a random step of the first layer's matrix: by its gradient, and by differences.

    What the model gives must keep its bits where a gradient is taken.
    """
    plan = active_plan(model, plan_capture(model), tensors)
    path = next(iter(plan.modules("hook")))
    layers, found = {path: plan.modules()[path]}, []

    def score_of(outputs):
        return (outputs[0][:, 3] * torch.arange(32)).sum()

    def score(step=None):
        def receive(call):
            if step is None:
                call.weights.register_hook(found.append)
                return None
            return change_of(layers[path], call, hidden[path], step, list(rows))

        with (
            exclusive(model, plan.configs),
            torch.set_grad_enabled(step is None),
            gradient_leaf(model) as leaf,
            kept_inputs(layers) as hidden,
            hook_capture(layers, receive),
        ):
            result = score_of(run_model(model, tensors, attentions=True))
            if step is None:
                torch.autograd.grad(result, leaf[0])
        return result.item()

    with exclusive(model, plan.configs):
        plain = score_of(run_model(model, tensors, attentions=True)).item()
    assert score() == plain
    (gradient,) = found
    step = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    slope = (score(size * step) - score(-size * step)) / (2 * size)
    return (gradient * step).sum().item(), slope


@pytest.mark.parametrize(
    ("model_type", "size", "tolerance"),
    [
        ("longformer", 1e-4, 1e-4),
        ("big_bird", 1e-4, 1e-4),
        ("longt5", 1e-5, 2e-2),
    ],  # float32 in LongT5's norms
)
def test_gradients_of_the_matrix_are_finite_differences(model_type, size, tolerance):
    model = build_model(model_type, attention="eager").double()
    tensors, rows = {"input_ids": IDS[:1], "attention_mask": MASK[:1]}, ()
    if model_type == "longformer":
        rows = (2,)
        tensors["global_attention_mask"] = torch.zeros_like(IDS[:1]).index_fill(1, torch.tensor(rows), 1)
    if model_type == "longt5":
        tensors["decoder_input_ids"] = IDS[:1, :5]
    gradient, slope = gradient_and_slope(model, tensors, size=size, rows=rows)
    assert slope == pytest.approx(gradient, rel=tolerance)


@pytest.mark.parametrize("kind", ["local", "transient-global"])
def test_transient_global_tokens_are_refused(kind):
    config = tiny_config(model_class("longt5").config_class, {"encoder_attention_type": kind})
    model = model_class("longt5")(config)
    if kind == "local":
        assert len(plan_capture(model).layers) == 6
    else:
        with pytest.raises(CaptureError, match="global tokens that are no positions of the input"):
            plan_capture(model)


def test_big_bird_that_would_switch_is_refused_and_left_as_it_was():
    model = build_model("big_bird", attention="eager")
    plan, before = plan_capture(model), [type(m).__name__ for m in model.modules()]
    with pytest.raises(CaptureError, match=r"at a probe of 14 tokens or fewer.*original_full"):
        active_plan(model, plan, {"input_ids": IDS[:, :12]})
    assert [type(m).__name__ for m in model.modules()] == before
    assert model.attention_type == "block_sparse"
    assert set(active_plan(model, plan, {"input_ids": IDS}).modules()) == set(plan.modules())


def test_big_bird_is_checked_at_a_length_at_which_its_blocks_are_sparse(monkeypatch):
    monkeypatch.setattr(batches, "LONGEST_CHECK", 8)
    checkpoint = tiny_big_bird()
    (found,) = capture(checkpoint, [Probe("a", text=" ".join(TEXTS))], method=Method(row="cls"))
    assert found.maps[0].weights.sum() == pytest.approx(1)
    for short in ([Probe("b", text=TEXTS[1])], [Probe("a", text=" ".join(TEXTS)), Probe("b", text=TEXTS[1])]):
        with pytest.raises(CaptureError, match="at a probe of 14 tokens or fewer"):
            list(capture(checkpoint, short, method=Method(row="cls")))


def tiny_big_bird():
    tokenizer = word_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "block_size": 2,
        "num_random_blocks": 1,
        "pad_token_id": 0,
        **LABELS,
    }
    return as_checkpoint(build("BigBirdForSequenceClassification", **sizes), tokenizer)


@pytest.mark.parametrize("method", ["rollout", "per_head_rollout", "gradient_rollout", "raw_attention"])
def test_longformer_is_captured_from_texts_with_its_global_start(method):
    """Its head makes the first token global by itself; the model pads, the map has the text's tokens."""
    tokenizer = word_tokenizer()
    sizes = {
        "vocab_size": len(tokenizer),
        "attention_window": [4, 4, 4],
        "pad_token_id": 0,
        "sep_token_id": 3,
    }
    checkpoint = as_checkpoint(
        build("LongformerForSequenceClassification", **sizes, **{**LABELS, "max_position_embeddings": 66}),
        tokenizer,
    )
    for one in capture(checkpoint, text_probes(), method=Method(name=method)):
        (found,) = one.maps
        assert found.weights.sum() == pytest.approx(1)
        assert len(found.weights) == len(found.positions.special)
    with pytest.raises(CaptureError, match="its values cannot be found"):
        list(capture(checkpoint, text_probes(), method=Method(name="norms")))
