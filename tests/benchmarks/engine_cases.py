"""The engines that bench_engines.py measures, each a function that runs one batch of a random model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from audit.capture.attention.interface import KernelCall, Replacing, interface_capture
from audit.capture.attention.layers import CapturePlan, plan_capture
from audit.capture.attention.passes import exclusive, fold_batch, run_model
from audit.capture.attention.scratch import Scratch
from audit.capture.engines.blocks import find_blocks
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.gradient import GradientFold, gradient_batch, gradient_leaf
from audit.capture.engines.region_forward import RegionFold, region_batch
from audit.capture.engines.row_backward import row_batch
from audit.capture.engines.row_fold import RowFold, row_fold_batch
from audit.capture.engines.settings import FoldSettings
from audit.capture.engines.split_rows import SplitRowFold, split_row_batch
from audit.capture.inputs.encoded import Encoded
from audit.methods.gradient import gradient_map, gradient_rollout
from audit.records import Checkpoint, CheckpointInfo, Positions, Probe

REGIONS = 8


@dataclass
class Subject:
    """A random model of a known shape and one batch for it; the CLS row is read."""

    model: Any
    tensors: dict[str, Tensor]
    read: Tensor
    valid: Tensor
    plan: CapturePlan = field(init=False)
    scratch: Scratch = field(default_factory=Scratch)

    def __post_init__(self) -> None:
        self.plan = plan_capture(self.model)


Engine = Callable[[Subject], Any]


def bert(n: int, batch: int, *, layers: int = 12) -> Subject:
    config = transformers.BertConfig(
        max_position_embeddings=max(n, 512), num_hidden_layers=layers, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    return subject(model, {"input_ids": torch.randint(5, 30000, (batch, n))}, n, batch)


def vit(batch: int, *, layers: int = 12) -> Subject:
    torch.manual_seed(0)
    config = transformers.ViTConfig(num_hidden_layers=layers, attn_implementation="sdpa")
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    return subject(model, {"pixel_values": torch.randn(batch, 3, 224, 224)}, 197, batch)


def subject(model: Any, tensors: dict[str, Tensor], n: int, batch: int) -> Subject:
    read = torch.zeros(batch, n)
    read[:, 0] = 1
    return Subject(model, tensors, read, torch.ones(batch, n, dtype=torch.bool))


def plain(one: Subject) -> None:
    with exclusive(one.model, one.plan.configs):
        run_model(one.model, one.tensors)


def eager(one: Subject) -> Tensor:
    """Keep every layer's weights and multiply them afterwards, as published code does."""
    one.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = one.model(**one.tensors, output_attentions=True).attentions
            identity = torch.eye(attentions[0].shape[-1])
            product = identity.expand(len(attentions[0]), -1, -1)
            for layer in attentions:
                product = (0.5 * layer.mean(dim=1) + 0.5 * identity) @ product
    finally:
        one.model.set_attn_implementation("sdpa")
    return product[:, 0]


def streaming(one: Subject) -> Tensor:
    fold = BatchFold(FoldSettings(), one.read, one.valid)
    fold_batch(one.model, one.plan, one.tensors, fold, scratch=one.scratch)
    return fold.final_row()


def region_columns(one: Subject) -> Tensor:
    torch.manual_seed(1)
    return torch.rand(*one.read.shape, REGIONS)


def regions(one: Subject) -> Tensor:
    fold = RegionFold(FoldSettings(), one.read, one.valid, region_columns(one))
    region_batch(one.model, one.plan, one.tensors, fold)
    return fold.masses[-1]


def row(one: Subject) -> Tensor:
    return rows_of(one, one.read[:, None], FoldSettings())[:, 0]


def rows_of(one: Subject, read: Tensor, settings: FoldSettings) -> Tensor:
    return row_batch(
        one.model, one.plan, one.tensors, read, one.valid, settings=settings, scratch=one.scratch
    )[0]


def many_rows(one: Subject) -> Tensor:
    return rows_of(one, one.read[:, None].expand(-1, 64, -1), FoldSettings())[:, 0]


def pruned_row(fusion: dict[str, Any]) -> Engine:
    """Return the engine of one row with heads fused or pruned row by row."""

    def run(one: Subject) -> Tensor:
        return rows_of(one, one.read[:, None], FoldSettings(fusion=fusion))

    return run


def stored(one: Subject) -> Tensor:
    """Return the output row, and on the way what a run stores: that of each layer, and the collapse."""
    fold = RowFold(FoldSettings(), one.read, one.valid, one.scratch)
    row_fold_batch(one.model, one.plan, one.tensors, fold)
    fold.diagnostics()
    return fold.final_row()


def norms(one: Subject) -> Tensor:
    """Return the output row of the norms of what each position adds, of every layer, without a matrix."""
    part = {name: tensor[:1, :256] for name, tensor in one.tensors.items()}
    with exclusive(one.model, one.plan.configs):
        blocks = find_blocks(one.model, one.plan, part)
    fold = SplitRowFold(FoldSettings(method="norms"), one.read, one.valid, one.scratch)
    split_row_batch(one.model, one.plan, blocks, one.tensors, fold)
    return fold.final_row()


def vit_classifier(batch: int, *, layers: int = 12) -> Subject:
    torch.manual_seed(0)
    config = transformers.ViTConfig(num_hidden_layers=layers, num_labels=10, attn_implementation="sdpa")
    model = transformers.ViTForImageClassification(config).eval()
    return subject(model, {"pixel_values": torch.randn(batch, 3, 224, 224)}, 197, batch)


def gradient(one: Subject) -> Tensor:
    """Return gradient rollout of class 0, in step with the backward pass."""
    info = CheckpointInfo(ref="random", digest="", weights_digest="", tokenizer_digest="")
    checkpoint = Checkpoint(info, one.model, None, task="image-classification", has_head=True)
    batch = [
        Encoded(Probe(str(i)), {}, Positions("patch", np.zeros(one.read.shape[1], np.bool_)))
        for i in range(len(one.read))
    ]
    fold = GradientFold(FoldSettings(method="gradient_rollout"), one.read, one.valid)
    wanted = {item.probe.id: 0 for item in batch}
    gradient_batch(checkpoint, one.plan, batch, one.tensors, fold, wanted=wanted)
    return fold.final_row()


def gradient_reference(one: Subject) -> Tensor:
    """Keep every layer's weights and gradients and roll them out afterwards, as published code does."""
    one.model.set_attn_implementation("eager")
    try:
        with torch.enable_grad():
            outputs = one.model(**one.tensors, output_attentions=True)
            gradients = torch.autograd.grad(outputs.logits[:, 0].sum(), outputs.attentions)
        attentions = [one.detach() for one in outputs.attentions]
        rows = gradient_rollout(attentions, list(gradients))[:, 0]
        return gradient_map(rows - one.read)[0]
    finally:
        one.model.set_attn_implementation("sdpa")


def forward_and_backward(one: Subject) -> None:
    """Take the gradient of class 0 with respect to the embedded patches."""
    with exclusive(one.model, one.plan.configs), torch.enable_grad(), gradient_leaf(one.model) as leaf:
        score = run_model(one.model, one.tensors).logits[:, 0].sum()
        torch.autograd.grad(score, leaf[0])


def attention_share(one: Subject) -> float:
    """Return the share of a plain forward pass that its fused attention takes."""
    spent = [0.0]
    clock = time.process_time

    def attend(call: KernelCall) -> tuple[Tensor, Tensor | None]:
        start = clock()
        found = call.run()
        spent[0] += clock() - start
        return found

    start = clock()
    with (
        exclusive(one.model, one.plan.configs),
        interface_capture(one.plan.modules("interface"), one.plan.configs, Replacing(attend)),
    ):
        run_model(one.model, one.tensors)
    return spent[0] / (clock() - start)
