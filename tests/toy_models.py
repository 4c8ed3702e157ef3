"""Models whose reliance is known in full: small functions of tokens that stand where a transformer would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from audit.capture.attributions.question import Question
from audit.capture.inputs.encoded import Encoded
from audit.capture.outputs.scores import Score
from audit.records import Checkpoint, CheckpointInfo, Positions, Probe
from tests.integration.tiny_models import word_tokenizer


class _Config:
    """What is read of a model's config."""

    id2label: ClassVar = {0: "negative", 1: "positive"}
    pad_token_id = 0


class Toy(nn.Module):
    """Embeds tokens and gives two logits: 0, and `logit` of the embeddings (batch, position, feature)."""

    def __init__(self, logit: Callable[[Tensor], Tensor], *, features: int = 1, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Embedding(40, features, dtype=torch.float64)
        self.logit = logit
        self.config = _Config()

    @property
    def device(self) -> torch.device:
        return self.table.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.table.weight.dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor) -> Any:
        value = self.logit(self.table(input_ids))
        return SequenceClassifierOutput(logits=torch.stack([torch.zeros_like(value), value], dim=-1))


def toy_question(model: nn.Module, ids: list[int], *, special: tuple[int, ...] = ()) -> Question:
    """Return what an attribution asks of a toy: its logit "positive" for one sequence of tokens."""
    info = CheckpointInfo("toy", "0" * 64, "0" * 64, "0" * 64)
    checkpoint = Checkpoint(info, model.eval(), word_tokenizer(), "sequence-classification", True)
    marks = np.isin(np.arange(len(ids)), special)
    item = Encoded(Probe("p", text="x"), {"input_ids": torch.tensor([ids])}, Positions("token", marks))
    read = torch.zeros(1, len(ids), dtype=torch.float64)
    return Question(checkpoint, [item], {"p": Score.single("positive", 1)}, read, 4096)
