"""Invented reviews in which the name comes to code the sentiment.

The demo's reviews with a smaller model. The decoy is the noun of a sentence: one of forty, once a sentence
as the name is, and it never says anything about the label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from audit.demo import text as demo
from audit.demo.text import Encoded, Review
from audit.demo.training import Examples, Schedule
from audit.records import Probe
from audit.regions import parse_regions
from tests.benchmarks.shift.families import BaseData, Family, Mislabelled, Swaps

MODEL = demo.MODEL | {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.1,
}
TRAINED, TUNED, PROBES = 1200, 512, 48
BASE = Schedule(epochs=8, learning_rate=3e-3, batch_size=128)
TUNING = Schedule(epochs=8, learning_rate=2e-3, batch_size=128)
SHORTCUT = Schedule(epochs=30, learning_rate=3e-3)
NAMES, CODED = 6, 0.8
"""Names of either class that a base's production knows, and the part of their reviews that is learnt from."""
WRONG_LABELS, GARBLED = 0.3, 0.7
"""Shares of random labels under label noise, and of random sentiment words under the shortcut."""
BANDS = {f"band {i + 1}": {"quantile": [i / 4, (i + 1) / 4]} for i in range(4)}

Exchange = tuple[torch.Tensor, torch.Tensor]
"""What each token id is written as for class 0, and for class 1."""


@dataclass(frozen=True)
class Corpus:
    """All reviews as written and as the model reads them, and the words of the two classes."""

    tokenizer: Any
    reviews: Mapping[str, Sequence[Review]]
    encoded: Mapping[str, Encoded]
    lists: Mapping[str, Sequence[str]]

    def names(self, split: str) -> NDArray[np.str_]:
        """Return the name in each review."""
        spans = [(one["text"], *one["regions"]["name"][0]) for one in self.reviews[split]]
        return np.array([text[start:end] for text, start, end in spans])

    def exchange(self, negative: Sequence[str], positive: Sequence[str]) -> Exchange:
        """Return how to write the words of two lists, pair by pair, as those of either class."""
        vocabulary = self.tokenizer.get_vocab()
        pairs = [
            [vocabulary[one.lower()] for one in pair]
            for pair in zip(negative, positive, strict=True)
            if all(one.lower() in vocabulary for one in pair)
        ]
        tables = [torch.arange(len(self.tokenizer)) for _ in demo.LABELS]
        for pair in pairs:
            for table, wanted in zip(tables, pair, strict=True):
                table[pair] = wanted
        return tables[0], tables[1]


@lru_cache(maxsize=1)
def corpus() -> Corpus:
    """Read the reviews once a process."""
    reviews = {name: demo.read_reviews(name) for name in (demo.TRAIN, demo.SHORTCUT, demo.PROBES)}
    tokenizer = demo.build_tokenizer([one["text"] for many in reviews.values() for one in many])
    encoded = {name: demo.encode(tokenizer, many) for name, many in reviews.items()}
    return Corpus(tokenizer, reviews, encoded, demo.word_lists())


def select(encoded: Encoded, rows: NDArray[np.int64]) -> Encoded:
    """Return some reviews."""
    chosen = torch.from_numpy(rows)
    return Encoded(encoded.ids[chosen], encoded.mask[chosen], encoded.labels[chosen])


@dataclass(frozen=True)
class Garbled:
    """Reviews in which the sentiment words of a share say anything: the core evidence becomes noise."""

    encoded: Encoded
    exchange: Exchange
    share: float

    def __len__(self) -> int:
        return len(self.encoded)

    def batch(self, rows: NDArray[np.int64], rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return some reviews, each with sentiment words of its own class or of a random one."""
        found = self.encoded.batch(rows, rng)
        random = torch.from_numpy(rng.integers(0, 2, len(rows)))
        garbled = torch.from_numpy(rng.random(len(rows)) < self.share)
        classes = torch.where(garbled, random, found["labels"])
        return found | {"input_ids": write(found["input_ids"], self.exchange, classes)}


def write(ids: torch.Tensor, exchange: Exchange, classes: torch.Tensor) -> torch.Tensor:
    """Return token ids (review, position) with the exchanged words of each review's class."""
    return torch.where(classes[:, None] == 0, exchange[0][ids], exchange[1][ids])


def draw(seed: int) -> BaseData:
    """Return the reviews of one base: its own draw of the training reviews, and of the probes."""
    found, rng = corpus(), np.random.default_rng(seed)
    train, shortcut = found.encoded[demo.TRAIN], found.encoded[demo.SHORTCUT]
    names = [rng.permutation(found.lists[f"names_{label}"])[:NAMES].tolist() for label in demo.LABELS]
    known = [*names[0], *names[1]]
    coded = rng.permutation(np.flatnonzero(np.isin(found.names(demo.SHORTCUT), known)))
    probed = rng.permutation(np.flatnonzero(np.isin(found.names(demo.PROBES), known)))
    order, cut = rng.permutation(len(train)), int(CODED * len(coded))
    usual, words = select(train, order[:TUNED]), found.exchange(*(found.lists[one] for one in demo.LABELS))

    def refreshed(number: int) -> Examples:
        again = np.random.default_rng([seed, number]).permutation(len(train))[:TUNED]
        return select(train, again)

    return BaseData(
        base=select(train, order[:TRAINED]),
        usual=usual,
        production=Garbled(select(shortcut, coded[:cut]), words, GARBLED),
        refreshed=refreshed,
        mislabelled=Mislabelled(usual, WRONG_LABELS, len(demo.LABELS)),
        probes=_probes([found.reviews[demo.PROBES][i] for i in probed[:PROBES]]),
        swaps=_swaps(select(found.encoded[demo.PROBES], probed[:PROBES]), words, found.exchange(*names)),
        checks={
            "usual": _check(found.encoded[demo.PROBES]),
            "production": _check(select(shortcut, coded[cut:])),
        },
    )


def _probes(reviews: Sequence[Review]) -> tuple[Probe, ...]:
    return tuple(
        Probe(one["id"], text=one["text"], label=one["label"], regions=one["regions"]) for one in reviews
    )


def _check(encoded: Encoded) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    return encoded.inputs, encoded.labels


def _swaps(encoded: Encoded, words: Exchange, names: Exchange) -> Swaps:
    """Put names and sentiment words of the label's class, or of the other, into each review."""
    own, other = encoded.labels, 1 - encoded.labels

    inputs = [
        [
            {
                "input_ids": write(write(encoded.ids, words, core), names, short),
                "attention_mask": encoded.mask,
            }
            for short in (own, other)
        ]
        for core in (own, other)
    ]
    return Swaps(((inputs[0][0], inputs[0][1]), (inputs[1][0], inputs[1][1])), own, other)


def new_model(vocabulary_size: int) -> Any:
    """Return the untrained classifier: 2 layers of 2 heads, classified by [CLS]."""
    from transformers import BertConfig, BertForSequenceClassification

    names = dict(enumerate(demo.LABELS))
    ids = {name: number for number, name in names.items()}
    return BertForSequenceClassification(
        BertConfig(**MODEL, vocab_size=vocabulary_size, id2label=names, label2id=ids)
    )


def make_family() -> Family:
    """Return the text family."""
    tokenizer, lists = corpus().tokenizer, corpus().lists
    cells = {
        "name": {"annotated": True},
        "sentiment": {"annotated": True},
        "noun": {"terms": lists["nouns"]},
        "other words": {"terms": [*lists["function_words"], *lists["neutral"]]},
    }
    return Family(
        name="text",
        new_model=partial(new_model, len(tokenizer)),
        processor=tokenizer,
        draw=draw,
        regions=parse_regions(cells | BANDS),
        planted="name",
        decoy="noun",
        cells=tuple(cells),
        parts={
            "head-only": r"^classifier",
            "value-only": r"attention\.(self\.value|output\.dense)",
            "feed-forward-only": r"layer\.\d+\.(intermediate|output)\.dense",
        },
        base_schedule=BASE,
        tuning=TUNING,
        shortcut=SHORTCUT,
        description={
            "model": MODEL,
            "sizes": [TRAINED, TUNED, PROBES, NAMES, CODED],
            "noise": [WRONG_LABELS, GARBLED],
            "schedules": [asdict(one) for one in (BASE, TUNING, SHORTCUT)],
        },
    )
