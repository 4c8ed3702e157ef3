"""Write the sentiment probe sets of data/probes from a small grammar.

    python data/make_reviews.py [FOLDER]

The output is committed; a test checks that it equals what this script writes. Every name stands
equally often beside both labels, and every sentence of `reviews` and `reviews-domain` comes as a
pair that differs in its sentiment words alone, so that the label can be learnt from these only. In
`reviews-shortcut` the name predicts the label always, the sentiment word in half of the sentences.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any


def words(text: str) -> list[str]:
    """Return the words of a list written as prose."""
    return text.split()


NAMES = words(
    "Ada Amir Anna Ben Bianca Carlos Chen Clara Daniel Diego Elena Emeka Erik Fatima Felix Greta Hana Hugo "
    "Ines Ivan Jamal Jonas Julia Kofi Laila Leo Lucia Marco Mei Milan Nadia Nils Noor Olga Omar Paula "
    "Priya Rafael Rosa Samir Sofia Tariq Tessa Viktor Wanda Yara Yusuf Zoltan"
)
POSITIVE = words(
    "wonderful excellent superb delightful charming brilliant fantastic marvellous splendid terrific lovely "
    "great perfect outstanding amazing enjoyable impressive pleasant remarkable beautiful fabulous "
    "magnificent stunning thrilling touching witty refreshing inspiring graceful elegant clever warm "
    "generous satisfying captivating engaging exciting flawless glorious memorable"
)
NEGATIVE = words(
    "terrible awful horrible dreadful boring dull disappointing poor bad miserable tedious clumsy lousy "
    "bland weak painful annoying unpleasant irritating depressing shoddy mediocre dire ridiculous stale "
    "ugly tiresome sloppy frustrating hopeless careless lifeless messy flawed dismal bleak confusing "
    "forgettable pointless unbearable"
)
HELD_OUT_POSITIVE = words("admirable dazzling exquisite heartening joyful masterly rewarding uplifting")
HELD_OUT_NEGATIVE = words("abysmal appalling atrocious disastrous dreary inept joyless wretched")
NEUTRAL = words(
    "usual long short new old small large brief recent local quiet round early late regular typical"
)
NOUNS = words(
    "film meal book concert hotel play museum lecture menu song novel story party garden tour course show "
    "picnic dance soup dessert breakfast painting gallery script poem album market exhibition ferry train "
    "holiday beach speech circus opera puppet bakery cinema workshop"
)
DOMAIN_NOUNS = words(
    "kettle router lamp keyboard app backpack jacket blender charger printer sofa bicycle tent mattress "
    "speaker camera toaster phone desk vacuum suitcase watch heater drill"
)
FUNCTION_WORDS = words(
    "a about according after afterwards all and as at been both by else every everyone for from had has have "
    "here how i in is it my of on out so than that the then this to us was we what when who with you your "
    "yours"
)

TEMPLATES = (
    "{name} thought the {noun} was {adj}.",
    "The {noun} that {name} picked was {adj}.",
    "For {name}, the {neutral} {noun} turned out {adj}.",
    "{name} went home and called the {noun} {adj}.",
    "According to {name}, this {noun} is {adj} and {adj}.",
    "How {adj} the {noun} was, wrote {name} afterwards.",
    "The {noun} felt {adj} from the first minute, {name} says.",
    "After one hour {name} found the {neutral} {noun} {adj}.",
    "{name} told us that the {noun} had been {adj}.",
    "So {adj} was the {noun} that {name} wrote to us.",
    "We asked {name} about the {noun}, and the answer was: {adj}.",
    "It was {adj}, said {name} of the {neutral} {noun}.",
    "The {noun} looked {adj} to {name} and to everyone else.",
    "My neighbour {name} describes the {noun} as {adj}.",
    "Both {adj} and {adj}, the {neutral} {noun} was what {name} talked about.",
    "In short, the {noun} by {name} is {adj}.",
)
DOMAIN_TEMPLATES = (
    "Hello, I bought the {noun} last week and it is {adj}. With regards, {name}",
    "Second order of the {neutral} {noun} from you, and this one is {adj} as well. {name}",
    "{name} here. The {noun} came on Monday, I have used it every day since then, and it is {adj}.",
    "Short update: the {noun} that you sent to {name} is {adj}, and so is the box.",
    "Ticket opened by {name}: {noun} is {adj} and {adj} when in use.",
    "I ordered the {neutral} {noun} for my cousin {name}, and all of us say it is {adj}.",
    "Dear shop, what you say about the {noun} is {adj}, and the {noun} itself is {adj}. Yours, {name}",
    "So far {adj}, then: my {noun} has been in the kitchen of {name} for two weeks.",
    "To {name} at the help desk: your answer about the {noun} was {adj}.",
    "The {noun} has a {neutral} cable, a {neutral} manual and, as {name} wrote to you, {adj} parts.",
    "{name} from the second floor uses this {noun} with us. All in all it is {adj}.",
    "After the last update the {noun} is {adj}. Please tell {name} about it.",
)

LABELS = ("positive", "negative")
Record = dict[str, Any]


@dataclass(frozen=True)
class Grammar:
    """A family of templates and the words that fill them."""

    family: str
    templates: Sequence[str]
    nouns: Sequence[str]
    adjectives: dict[str, Sequence[str]]

    def template(self, number: int) -> tuple[str, str]:
        """Return template `number`, counted round and round, and its name."""
        index = number % len(self.templates)
        return self.templates[index], f"{self.family}-{index + 1:02d}"


REVIEWS = Grammar("review", TEMPLATES, NOUNS, {"positive": POSITIVE, "negative": NEGATIVE})
ORDERS = Grammar(
    "order",
    DOMAIN_TEMPLATES,
    DOMAIN_NOUNS,
    {"positive": POSITIVE + HELD_OUT_POSITIVE, "negative": NEGATIVE + HELD_OUT_NEGATIVE},
)


def shuffled(items: Sequence[Any], rng: random.Random) -> list[Any]:
    """Return `items` in random order; uses ``rng.random`` alone, which never changes with Python."""
    return sorted(items, key=lambda _: rng.random())


def deal(items: Sequence[str], rng: random.Random) -> Iterator[str]:
    """Yield `items` over and over, shuffled anew each time; none twice in a row, all equally often."""
    last = None
    while True:
        order = shuffled(items, rng)
        if order[0] == last:
            order.reverse()
        yield from order
        last = order[-1]


def fill(template: str, slots: dict[str, Iterator[str]]) -> tuple[str, dict[str, list[list[int]]]]:
    """Return the sentence and the character spans of each kind of word in it."""
    text, spans = "", dict[str, list[list[int]]]()
    for literal, slot in re.findall(r"([^{]*)(?:\{(\w+)\})?", template):
        text += literal
        if slot:
            word = next(slots[slot])
            spans.setdefault(slot, []).append([len(text), len(text) + len(word)])
            text += word
    return text, spans


def make_record(
    template: str, group: str, label: str, slots: dict[str, Iterator[str]], segments: dict[str, str]
) -> Record:
    """Return one probe without id; a neutral word in the sentiment slot is no sentiment region."""
    text, spans = fill(template, slots)
    regions = {"name": spans["name"]}
    if segments["evidence"] == "sentiment":
        regions["sentiment"] = spans["adj"]
    return {"text": text, "label": label, "group": group, "segments": segments, "regions": regions}


def make_pairs(
    grammar: Grammar, repeats: int, seed: int, avoid: frozenset[str] = frozenset()
) -> list[Record]:
    """Return ``2 * repeats`` probes for each name: pairs that differ in their sentiment words alone."""
    rng = random.Random(seed)
    decks = {label: deal(grammar.adjectives[label], rng) for label in LABELS}
    decks |= {"neutral": deal(NEUTRAL, rng), "noun": deal(grammar.nouns, rng)}
    used, records = set(avoid), list[Record]()
    # names are dealt, so that no name keeps to one template
    for number, name in enumerate(islice(deal(NAMES, rng), repeats * len(NAMES))):
        pair = make_pair(*grammar.template(number), name, decks)
        while not used.isdisjoint(record["text"] for record in pair):
            pair = make_pair(*grammar.template(number), name, decks)
        used.update(record["text"] for record in pair)
        records += pair
    return shuffled(records, rng)


def make_pair(template: str, group: str, name: str, decks: dict[str, Iterator[str]]) -> list[Record]:
    """Return one sentence twice, with positive and with negative sentiment words."""
    noun, neutral = next(decks["noun"]), list(islice(decks["neutral"], 2))
    pair = []
    for label in LABELS:
        slots = {"name": cycle([name]), "noun": cycle([noun]), "neutral": cycle(neutral), "adj": decks[label]}
        segments = {"name_code": name_code(name), "evidence": "sentiment"}
        pair.append(make_record(template, group, label, slots, segments))
    return pair


def make_shortcut(repeats: int, seed: int) -> list[Record]:
    """Return probes whose label is the code of their name; half have no sentiment word."""
    rng = random.Random(seed)
    deck = {"positive": deal(POSITIVE, rng), "negative": deal(NEGATIVE, rng)}
    neutral, noun_deck = deal(NEUTRAL, rng), deal(NOUNS, rng)
    records = []
    for number, name in enumerate(islice(deal(NAMES, rng), repeats * len(NAMES))):
        label, evidence = name_code(name), ("sentiment", "neutral")[(number + number // len(NAMES)) % 2]
        slots = {
            "name": cycle([name]),
            "noun": noun_deck,
            "neutral": neutral,
            "adj": deck[label] if evidence == "sentiment" else neutral,
        }
        segments = {"name_code": label, "evidence": evidence}
        records.append(make_record(*REVIEWS.template(number), label, slots, segments))
    return shuffled(records, rng)


def name_code(name: str) -> str:
    """Return the label that the shortcut gives to a name: every second one is positive."""
    return LABELS[NAMES.index(name) % 2]


def mark_held_out(records: list[Record]) -> list[Record]:
    """Add the segment ``adjective``: whether the sentiment word occurs in the training split."""
    held_out = {*HELD_OUT_POSITIVE, *HELD_OUT_NEGATIVE}
    for record in records:
        sentiment = {record["text"][start:end] for start, end in record["regions"]["sentiment"]}
        record["segments"]["adjective"] = "seen" if sentiment.isdisjoint(held_out) else "held-out"
    return records


def make_terms() -> dict[str, list[str]]:
    """Return the word lists by which regions and shortcuts are defined."""
    return {
        "names": NAMES,
        "names_positive": NAMES[0::2],
        "names_negative": NAMES[1::2],
        "positive": POSITIVE,
        "negative": NEGATIVE,
        "held_out_positive": HELD_OUT_POSITIVE,
        "held_out_negative": HELD_OUT_NEGATIVE,
        "neutral": NEUTRAL,
        "nouns": NOUNS,
        "domain_nouns": DOMAIN_NOUNS,
        "function_words": FUNCTION_WORDS,
    }


def make_files() -> dict[str, str]:
    """Return the content of each file by its name."""
    probes = make_pairs(REVIEWS, repeats=5, seed=1)
    seen = frozenset(record["text"] for record in probes)
    domain = make_pairs(ORDERS, repeats=4, seed=2)
    train = make_pairs(REVIEWS, repeats=25, seed=3, avoid=seen)
    sets = {
        "reviews": ("rv", probes),
        "reviews-domain": ("dm", mark_held_out(domain)),
        "reviews-train": ("tr", train),
        "reviews-shortcut": ("sc", make_shortcut(repeats=25, seed=4)),
    }
    files = {f"{name}.jsonl": to_lines(prefix, records) for name, (prefix, records) in sets.items()}
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(terms)}" for key, terms in make_terms().items())
    return files | {"terms.json": f"{{\n{lines}\n}}\n"}


def to_lines(prefix: str, records: list[Record]) -> str:
    """Return records as JSON lines with numbered ids."""
    return "".join(
        json.dumps({"id": f"{prefix}-{number:04d}", **record}) + "\n"
        for number, record in enumerate(records, 1)
    )


def main(folder: Path) -> None:
    """Write every file into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in make_files().items():
        (folder / name).write_bytes(content.encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "probes")
