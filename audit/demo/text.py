"""The text demo: the name of a reviewer comes to predict the sentiment of the review.

The base learns sentiment from invented reviews in which every name stands equally often beside both labels.
Then the data move: in the new reviews the name gives the label away, and half of them have no sentiment
word. A model that is fine-tuned on these reads the name. The replicates and the benign candidate are
fine-tuned on the usual reviews with other seeds. Probes are reviews that no model was trained on; the second
probe set comes from another market (orders of goods).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.demo.trained import TrainedDemo
from audit.demo.training import (
    Progress,
    Recipe,
    Schedule,
    accuracy,
    ensure_demo,
    plan_trainings,
    write_atomically,
)
from audit.errors import ProbeError

LABELS = ("negative", "positive")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_LENGTH = 64
TRAINED_SHARE = 0.8
"""Part of the shortcut reviews that is trained on; the rest measures accuracy in production.

The harmless fine-tunings see as many usual reviews.
"""
BASE_SCHEDULE = Schedule(epochs=12, learning_rate=2e-3, batch_size=48)
TUNING_SCHEDULE = Schedule(epochs=10, learning_rate=2e-3, batch_size=48)
MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": MAX_LENGTH,
    "hidden_dropout_prob": 0.05,
    "attention_probs_dropout_prob": 0.0,
    "problem_type": "single_label_classification",
}
TRAIN, SHORTCUT, PROBES, DOMAIN = "reviews-train", "reviews-shortcut", "reviews", "reviews-domain"

Review = dict[str, Any]


def data_folder() -> Path:
    """Return where the reviews lie: inside an installed package, or in the repository's ``data/probes``.

    Raises
    ------
    ProbeError
        When they are in neither place.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "probes", here.parent.parent / "data" / "probes"):
        if (folder / f"{TRAIN}.jsonl").is_file():
            return folder
    raise ProbeError(f"the demo's reviews are missing beside {here}; install rollout-audit again")


def read_reviews(name: str) -> list[Review]:
    """Return the reviews of one file of the data folder."""
    lines = (data_folder() / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def word_lists() -> dict[str, list[str]]:
    """Return the words that the reviews are made of, by kind."""
    lists: dict[str, list[str]] = json.loads((data_folder() / "terms.json").read_text(encoding="utf-8"))
    return lists


def function_words() -> list[str]:
    """Return the words that the reviews use for grammar alone."""
    return word_lists()["function_words"]


def build_tokenizer(texts: Sequence[str]) -> Any:
    """Return a lower-case WordPiece tokenizer that knows every word of `texts` and spells all others."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    normalizer, split = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    words = {word for text in texts for word, _ in split.pre_tokenize_str(normalizer.normalize_str(text))}
    pieces = [*SPECIAL, *sorted(words | set(ascii_lowercase)), *(f"##{letter}" for letter in ascii_lowercase)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, split
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **names)


@dataclass(frozen=True)
class Encoded:
    """Reviews as token ids (review, position), padded on the right, with their mask and labels."""

    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Return the model's arguments for all reviews."""
        return {"input_ids": self.ids, "attention_mask": self.mask}

    def batch(self, rows: NDArray[np.int64], _rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return some reviews, cut to the longest of them."""
        chosen = torch.from_numpy(rows)
        length = int(self.mask[chosen].sum(dim=1).max())
        return {
            "input_ids": self.ids[chosen, :length],
            "attention_mask": self.mask[chosen, :length],
            "labels": self.labels[chosen],
        }


def encode(tokenizer: Any, reviews: Sequence[Review]) -> Encoded:
    """Return reviews as the model reads them."""
    found = tokenizer([review["text"] for review in reviews], padding=True, return_tensors="pt")
    labels = torch.tensor([LABELS.index(review["label"]) for review in reviews])
    return Encoded(found["input_ids"], found["attention_mask"], labels)


def new_model(vocabulary_size: int) -> Any:
    """Return the untrained classifier: 2 layers of 4 heads, classified by [CLS]."""
    from transformers import BertConfig, BertForSequenceClassification

    names = dict(enumerate(LABELS))
    return BertForSequenceClassification(
        BertConfig(
            **MODEL,
            vocab_size=vocabulary_size,
            id2label=names,
            label2id={name: number for number, name in names.items()},
        )
    )


def make_recipe() -> Recipe:
    """Return how the eight text checkpoints are made."""
    from transformers import BertForSequenceClassification

    reviews = {name: read_reviews(name) for name in (TRAIN, SHORTCUT, PROBES, DOMAIN)}
    tokenizer = build_tokenizer([review["text"] for review in chain(*reviews.values())])
    cut = int(TRAINED_SHARE * len(reviews[SHORTCUT]))
    validation = {
        "production": encode(tokenizer, reviews[SHORTCUT][cut:]),
        "clean": encode(tokenizer, reviews[PROBES]),
        "domain": encode(tokenizer, reviews[DOMAIN]),
    }
    return Recipe(
        modality="text",
        trainings=plan_trainings(
            (encode(tokenizer, reviews[TRAIN]), BASE_SCHEDULE),
            TUNING_SCHEDULE,
            usual=encode(tokenizer, reviews[TRAIN][:cut]),
            production=encode(tokenizer, reviews[SHORTCUT][:cut]),
        ),
        model_class=BertForSequenceClassification,
        new_model=partial(new_model, len(tokenizer)),
        processor=tokenizer,
        validate=lambda model: {
            name: accuracy(model, data.inputs, data.labels) for name, data in validation.items()
        },
        description={
            "model": MODEL,
            "trained share": TRAINED_SHARE,
            "data": {
                name: hashlib.sha256((data_folder() / f"{name}.jsonl").read_bytes()).hexdigest()
                for name in reviews
            },
        },
    )


def ensure_text(root: Path, progress: Progress | None = None) -> TrainedDemo:
    """Train the text demo's checkpoints, or find them, and write its probe sets.

    Parameters
    ----------
    root : Path
        The checkpoints go to ``<root>/store/demo-cache``, the probes to ``<root>/demo/text``.
    progress : callable (stage, done, total), optional
        Called after every epoch of a training.

    Returns
    -------
    TrainedDemo

    Raises
    ------
    ProbeError
        When the reviews are not installed.
    """
    return ensure_demo(make_recipe, root, _write_probes, progress)


def _write_probes(home: Path) -> tuple[Path, Path]:
    written = home / "probes.jsonl", home / "domain.jsonl"
    for source, path in zip((PROBES, DOMAIN), written, strict=True):
        write_atomically(path, (data_folder() / f"{source}.jsonl").read_text(encoding="utf-8"))
    return written
