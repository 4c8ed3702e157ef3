"""One input of a model of two streams, the other held fixed: what attribution methods ask a model for.

Attribution methods take a function of one input. Of two towers that is the similarity as a function of
the text, or of the image; of an encoder-decoder the logits at the rows that are read as a function of the
source, or of the decoder's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import SequenceClassifierOutput

from audit.capture.attention.passes import run_model
from audit.capture.attention.threads import own_thread
from audit.capture.attributions.attribution import AttributionFold, attribute
from audit.capture.attributions.embedded import embedded
from audit.capture.attributions.question import Question
from audit.capture.engines.fold import BatchFold
from audit.capture.engines.settings import FoldSettings
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.scores import Score
from audit.capture.outputs.targets import similarity
from audit.capture.pairs.multi import StreamRows
from audit.errors import CaptureError
from audit.records import Checkpoint, Positions

TOKENS = ("input_ids", "decoder_input_ids")
"""Inputs that are tokens."""


class _Table(nn.Module):
    """A table of embeddings with a place of its own for hooks: two streams may share the table."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table

    @property
    def weight(self) -> Tensor:
        """Return the embeddings (token, dim)."""
        weight: Tensor = self.table.weight
        return weight

    @property
    def watched(self) -> bool:
        """Return whether a hook waits; where none does, the model is left to its own table."""
        return bool(self._forward_hooks)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the embedding of each id."""
        found: Tensor = self.table(ids)
        return found


class Half(nn.Module):
    """A model as a function of one of its inputs; its single logit is the target's.

    Parameters
    ----------
    model : model of transformers
    name : str
        The input that varies: ``input_ids`` or ``decoder_input_ids``, or pixels or features of sound. Of
        tokens, it is called as ``input_ids``.
    fixed : mapping of argument to Tensor (1, …)
        The others.
    score : Score
        Over the flat logits of one probe, or the similarity.
    table : nn.Module, optional
        The tokens' embeddings.
    """

    def __init__(
        self, model: nn.Module, name: str, fixed: Mapping[str, Tensor], score: Score, table: Any = None
    ) -> None:
        super().__init__()
        core = core_model(model)
        self.model, self.name, self.fixed, self.score = model, name, dict(fixed), score
        self.config, self.device, self.dtype = core.config, core.device, core.dtype
        self.stack = stack_of(core, name)
        self.table = table if table is None or self.stack is None else _Table(table)

    def get_input_embeddings(self) -> Any:
        """Return the table of the input that varies."""
        return self.table

    def forward(self, input_ids: Tensor | None = None, **numbers: Tensor) -> SequenceClassifierOutput:
        """Return the target's score as the only logit; `numbers` is the input where it is no text."""
        given = numbers.get(self.name) if input_ids is None else input_ids
        if given is None:
            raise ValueError(f"input: expected input_ids or {self.name}, got none")
        feed = {name: tensor.expand(len(given), *tensor.shape[1:]) for name, tensor in self.fixed.items()}
        feed[self.name] = given
        with ExitStack() as stack:
            if isinstance(self.table, _Table) and self.table.watched:
                put = embedded_in(self.stack, self.table.table, self.table(given), given)
                stack.enter_context(put)
            outputs = run_model(self.model, feed, keep_logits=True)
        own = similarity(outputs)
        logits = outputs.logits.flatten(1) if own is None else own[:, None]
        return SequenceClassifierOutput(logits=self.score.of(logits)[:, None])


def stack_of(core: Any, name: str) -> Any:
    """Return which stack of an encoder-decoder takes an input of tokens, None in other models."""
    if name not in TOKENS or not getattr(core.config, "is_encoder_decoder", False):
        return None
    return core.get_encoder() if name == "input_ids" else core.get_decoder()


@contextmanager
def embedded_in(stack: Any, table: nn.Module, given: Tensor, ids: Tensor) -> Iterator[None]:
    """Put `given` in the place of what `table` returns for `ids` while `stack` runs: two may share it.

    Not by the argument for embedded inputs: Marian scales what its table returns, and would not scale these.
    """
    running = [stack is None]

    def turn(*_given: Any) -> None:
        running[0] = not running[0]

    with ExitStack() as hooks:
        if stack is not None:
            hooks.callback(stack.register_forward_pre_hook(own_thread(turn)).remove)
            hooks.callback(stack.register_forward_hook(own_thread(turn)).remove)
        hooks.enter_context(embedded(table, given, ids, running=lambda: running[0]))
        yield


@dataclass(frozen=True)
class Halves:
    """What is asked of both inputs of a batch.

    `names` are the tensors of the two streams, `tables` the embeddings of those that are tokens.
    """

    checkpoint: Checkpoint
    settings: FoldSettings
    names: tuple[str, str]
    tables: tuple[Any, Any]
    budget: int
    alone: bool = False

    def streams(
        self,
        batch: Sequence[Encoded],
        positions: Sequence[tuple[Positions, Positions]],
        targets: Mapping[str, Score],
        causal: tuple[Tensor, Tensor],
    ) -> tuple[StreamRows, StreamRows]:
        """Return the maps of both streams: what the target logit gets from each position.

        Raises
        ------
        CaptureError
            For an input that is neither tokens, pixels nor sound.
        """
        found = []
        for i, name in enumerate(self.names):
            rows = [
                self._row(item, own[i], name, self.tables[i], targets[item.probe.id])
                for item, own in zip(batch, positions, strict=True)
            ]
            numbers = {key: torch.tensor([extra[key] for _, extra in rows]) for key in rows[0][1]}
            found.append(StreamRows(torch.stack([row for row, _ in rows]), [], causal[i], numbers))
        return found[0], found[1]

    def _row(
        self, item: Encoded, positions: Positions, name: str, table: Any, score: Score
    ) -> tuple[Tensor, dict[str, float]]:
        tensors = dict(item.tensors)
        token = name in TOKENS
        if name not in tensors or (token and table is None):
            raise CaptureError(
                f"[method] name = {self.settings.method!r} explains tokens, pixels and sound, but the "
                f"checkpoint takes {', '.join(tensors)}; use gradient_rollout"
            )
        taken = tensors.pop(name)
        half = Half(self.checkpoint.model, name, tensors, score, table)
        asked, cells = ("input_ids", None) if token else (name, item.cells)
        view = Encoded(item.probe, {asked: taken}, positions, cells=cells)
        read = torch.full((1, len(positions)), 1 / len(positions), device=half.device)
        fold = AttributionFold(self.settings, BatchFold(FoldSettings(), read, torch.ones_like(read).bool()))
        subject = replace(self.checkpoint, model=half, task="sequence-classification")
        only = {item.probe.id: Score.single(score.name, 0)}
        attribute(Question(subject, [view], only, read, self.budget, alone=self.alone), fold)
        extra = {key: float(value[0]) for key, value in fold.diagnostics().items()}
        return fold.final_row()[0], extra


def input_tables(
    checkpoint: Checkpoint, wiring: str, names: tuple[str, str], roots: tuple[str, str]
) -> tuple[Any, Any]:
    """Return the tables of embeddings of the streams that are tokens, None for the others."""
    core = core_model(checkpoint.model)
    parts = (
        (core.get_encoder(), core.get_decoder())
        if wiring == "encoder-decoder"
        else (core.get_submodule(roots[0]), core.get_submodule(roots[1]))
    )
    first, second = (
        _table_of(part) if name in TOKENS else None for name, part in zip(names, parts, strict=True)
    )
    return first, second


def _table_of(part: Any) -> Any:
    """Return the embeddings of tokens; where a model does not name them (OWL-ViT), those of its size."""
    try:
        return part.get_input_embeddings()
    except NotImplementedError:
        size = getattr(part.config, "vocab_size", None)
        tables = (module for module in part.modules() if isinstance(module, nn.Embedding))
        return next((table for table in tables if table.num_embeddings == size), None)
