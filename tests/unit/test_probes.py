"""Probe sets: every format gives the same probes and digests, and every mistake one clear line."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from audit.errors import ProbeError
from audit.media import load_audio, load_image, save_audio
from audit.probes import as_probes, content_digest, load_annotations, read_probes, write_probes
from audit.records import Probe

DATA = Path(__file__).parents[2] / "data"
RECORDS = [
    {
        "id": "r-1",
        "text": "Zoë said:\nit was great, “really”.",
        "label": "positive",
        "group": "t-1",
        "segments": {"language": "en", "year": "2020"},
        "regions": {"name": [[0, 3]], "claim": {"text": [[17, 22]]}},
    },
    {
        "id": "r-2",
        "text": "He, too",
        "text_pair": "and she",
        "label": 3,
        "regions": {"name": {"text_pair": [[4, 7]]}},
    },
    {"id": "3", "text": "plain", "label": [1, 2], "group": "t-1"},
]


def digests(probes):
    return probes.inputs_digest, probes.annotations_digest


def write_lines(path, records, *, end="\n"):
    path.write_bytes(end.join(json.dumps(record, ensure_ascii=False) for record in records).encode())
    return path


def picture(path, seed=0, size=(4, 6)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


def refused(path, **kwargs):
    with pytest.raises(ProbeError) as caught:
        read_probes(path, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 11
    return message


# --- formats ----------------------------------------------------------------------------------


def test_jsonl_keeps_every_field(tmp_path):
    probes = read_probes(write_lines(tmp_path / "p.jsonl", RECORDS))
    first, second, third = probes
    assert first.text == RECORDS[0]["text"]
    assert first.segments == {"language": "en", "year": "2020"}
    assert first.regions == {"claim": {"text": [[17, 22]]}, "name": [[0, 3]]}
    assert (second.text_pair, second.label, second.group) == ("and she", 3, None)
    assert (third.id, third.label) == ("3", [1, 2])
    assert probes.source.endswith("p.jsonl")


def test_formats_agree_in_both_digests(tmp_path):
    import polars as pl

    expected = digests(read_probes(write_lines(tmp_path / "p.jsonl", RECORDS)))
    flat = [
        {
            key: json.dumps(record.get(key))
            if key in {"segments", "regions"} and key in record
            else record.get(key)
            for key in ("label", "id", "text", "text_pair", "group", "segments", "regions")
        }
        for record in RECORDS
    ]
    cells = [
        {**row, "label": row["label"] if isinstance(row["label"], str) else json.dumps(row["label"])}
        for row in flat
    ]
    pl.DataFrame(cells).write_csv(tmp_path / "p.csv")
    pl.DataFrame(cells).write_csv(tmp_path / "p.tsv", separator="\t")
    assert digests(read_probes(tmp_path / "p.csv")) == expected
    assert digests(read_probes(tmp_path / "p.tsv")) == expected


def test_parquet_agrees_with_jsonl(tmp_path):
    import polars as pl

    records = [
        {**record, "label": number, "regions": {"name": [[0, 2]]} if number else {}}
        for number, record in enumerate(RECORDS)
    ]
    expected = digests(read_probes(write_lines(tmp_path / "p.jsonl", records)))
    nested = [
        {"regions": r["regions"] or {"name": None}, "segments": r.get("segments") or {"year": None}}
        for r in records
    ]
    frame = pl.DataFrame(
        [{**r, **n, "label": float(r["label"])} for r, n in zip(records, nested, strict=True)],
        infer_schema_length=None,
    )
    frame.write_parquet(tmp_path / "p.parquet")
    assert digests(read_probes(tmp_path / "p.parquet")) == expected


def test_csv_with_mapped_columns(tmp_path):
    path = tmp_path / "p.csv"
    path.write_bytes(b'\xef\xbb\xbfsentence,lang,idx\r\n"a, b",en,1\r\n"c\r\nd",de,2\r\n')
    probes = read_probes(path, columns={"text": "sentence", "segments.language": "lang"})
    assert [probe.text for probe in probes] == ["a, b", "c\nd"]
    assert [probe.segments["language"] for probe in probes] == ["en", "de"]


def test_image_folder_takes_classes_from_sub_folders(tmp_path):
    pixels = [picture(tmp_path / name, seed) for seed, name in enumerate(["7/b.png", "7/a.png", "3/c.png"])]
    probes = read_probes(tmp_path)
    assert [probe.label for probe in probes] == ["3", "7", "7"]
    np.testing.assert_array_equal(load_image(probes.probes[1].image), pixels[1])
    assert probes.ids[1] == content_digest(Probe("", image=pixels[1]))[:16]


def test_one_sub_folder_is_no_class(tmp_path):
    picture(tmp_path / "images" / "a.png")
    assert read_probes(tmp_path).probes[0].label is None


def test_image_folder_with_metadata(tmp_path):
    picture(tmp_path / "images/1.png")
    picture(tmp_path / "masks/1.png", 1)
    line = {
        "file_name": "images/1.png",
        "label": 7,
        "regions": {"corner": {"box": [0, 0, 0.5, 1]}, "lesion": {"mask": "masks/1.png"}},
    }
    write_lines(tmp_path / "metadata.jsonl", [line])
    (probe,) = read_probes(tmp_path)
    assert probe.image == str(tmp_path / "images/1.png")
    assert probe.regions["corner"] == {"box": [0.0, 0.0, 0.5, 1.0]}
    mask = load_annotations(probe).regions["lesion"]["mask"]
    assert mask.shape == (4, 6)
    assert 0 <= mask.min() < mask.max() <= 1
    assert load_annotations(replace(probe, regions={})) == replace(probe, regions={})


def test_audio_folder_and_spans_in_seconds(tmp_path):
    save_audio(tmp_path / "a.wav", np.linspace(-1, 1, 800, dtype=np.float32), 8000)
    line = {"file_name": "a.wav", "label": "yes", "regions": {"noise": [[0, 0.05]]}}
    plain = read_probes(tmp_path)
    write_lines(tmp_path / "metadata.jsonl", [line])
    (probe,) = read_probes(tmp_path)
    assert probe.modality == "audio"
    assert probe.regions == {"noise": [[0.0, 0.05]]}
    assert plain.ids == (probe.id,)


def test_messages_are_kept(tmp_path):
    messages = [{"role": "user", "content": "Is she up?"}]
    record = {"messages": messages, "regions": {"name": [[3, 6]]}}
    (probe,) = read_probes(write_lines(tmp_path / "p.jsonl", [record]))
    assert probe.messages == messages


def test_datasets_missing_names_the_extra(tmp_path, monkeypatch):
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'rollout-audit[datasets]'" in refused(tmp_path)


def test_dataset_of_several_splits_names_them(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert str(tmp_path / "train") in refused(tmp_path)


# --- digests ----------------------------------------------------------------------------------

WORDS = st.text(alphabet='ab ßé\u2028\n\r"\\,😀', min_size=1, max_size=12).filter(str.strip)
RECORD = st.fixed_dictionaries(
    {"text": WORDS},
    optional={
        "label": st.one_of(st.integers(-9, 9), st.sampled_from(["pos", "neg"])),
        "group": st.sampled_from(["g1", "g2"]),
        "segments": st.dictionaries(st.sampled_from(["lang", "source"]), st.sampled_from(["en", "de"])),
        "regions": st.dictionaries(st.sampled_from(["name", "claim"]), st.just([[0, 1]]), min_size=1),
    },
)
SETS = st.lists(RECORD, min_size=1, max_size=4, unique_by=lambda record: record["text"])


@given(SETS, st.randoms(use_true_random=False), st.booleans())
@settings(max_examples=40, deadline=None)
def test_digests_ignore_key_order_line_ends_format_and_place(tmp_path_factory, records, random, ascii_only):
    folder = tmp_path_factory.mktemp("sets")
    expected = digests(as_probes(records))
    shuffled = []
    for record in records:
        keys = list(record)
        random.shuffle(keys)
        shuffled.append(json.dumps({key: record[key] for key in keys}, ensure_ascii=ascii_only))
    path = folder / "deep" / "other.jsonl"
    path.parent.mkdir()
    path.write_bytes(("\ufeff" + "\r\n".join(shuffled) + "\r\n\r\n").encode())
    probes = read_probes(path)
    assert digests(probes) == expected
    write_probes(folder / "again.jsonl", probes)
    again = read_probes(folder / "again.jsonl")
    assert again.probes == probes.probes
    assert digests(again) == expected


@given(SETS, SETS)
@settings(max_examples=60, deadline=None)
def test_digests_differ_exactly_when_the_sets_differ(first, second):
    one, other = as_probes(first), as_probes(second)
    inputs = [[(p.id, p.text) for p in probes] for probes in (one, other)]
    notes = [[(p.id, p.label, p.group, p.segments, p.regions) for p in probes] for probes in (one, other)]
    assert (one.inputs_digest == other.inputs_digest) == (inputs[0] == inputs[1])
    assert (one.annotations_digest == other.annotations_digest) == (notes[0] == notes[1])


@pytest.mark.parametrize(
    "change",
    [
        {"text": "a  b"},
        {"text": "a b "},
        {"text": "A b"},
        {"text_pair": "c"},
        {"id": "q"},
        {"image": np.zeros((2, 2, 3), np.uint8)},
    ],
)
def test_inputs_digest_depends_on_what_changes_the_input(change):
    base = {"id": "p", "text": "a b"}
    assert as_probes([base]).inputs_digest != as_probes([{**base, **change}]).inputs_digest


@pytest.mark.parametrize(
    "change",
    [
        {"label": "x"},
        {"group": "g"},
        {"segments": {"a": "b"}},
        {"regions": {"n": [[0, 1]]}},
        {"regions": {"n": [[0, 2]]}},
    ],
)
def test_annotations_do_not_change_the_inputs_digest(change):
    base = {"id": "p", "text": "a b", "label": "y"}
    before, after = as_probes([base]), as_probes([{**base, **change}])
    assert before.inputs_digest == after.inputs_digest
    assert before.annotations_digest != after.annotations_digest


def test_order_of_probes_is_part_of_the_inputs():
    assert as_probes(["a", "b"]).inputs_digest != as_probes(["b", "a"]).inputs_digest


def test_unicode_forms_are_different_inputs():
    assert as_probes(["é"]).inputs_digest != as_probes(["e\u0301"]).inputs_digest


def test_images_are_digested_by_pixels(tmp_path):
    pixels = picture(tmp_path / "a.png")
    Image.fromarray(pixels).save(tmp_path / "b.bmp")
    Image.fromarray(pixels).convert("RGBA").save(tmp_path / "c.png", compress_level=0)
    same = {content_digest(Probe("", image=str(tmp_path / name))) for name in ("a.png", "b.bmp", "c.png")}
    assert same == {content_digest(Probe("", image=pixels))}
    changed = pixels.copy()
    changed[0, 0, 0] ^= 1
    assert content_digest(Probe("", image=changed)) not in same
    assert content_digest(Probe("", image=pixels.reshape(6, 4, 3))) not in same


def test_masks_are_digested_by_pixels(tmp_path):
    picture(tmp_path / "i.png")
    for name, seed in (("m.png", 1), ("same.bmp", 1), ("other.png", 2)):
        picture(tmp_path / name, seed)
    found = [
        digests(
            read_probes(
                write_lines(
                    tmp_path / "p.jsonl", [{"id": "x", "image": "i.png", "regions": {"r": {"mask": mask}}}]
                )
            )
        )
        for mask in ("m.png", "same.bmp", "other.png")
    ]
    assert found[0] == found[1]
    assert found[0][0] == found[2][0]
    assert found[0][1] != found[2][1]


def test_sounds_are_digested_by_samples_and_rate(tmp_path):
    samples = (np.arange(-50, 50) / 128).astype(np.float32)
    from scipy.io import wavfile

    save_audio(tmp_path / "f.wav", samples, 8000)
    wavfile.write(tmp_path / "i.wav", 8000, (samples * 32768).astype(np.int16))
    wavfile.write(tmp_path / "u.wav", 8000, (samples * 128 + 128).astype(np.uint8))
    wavfile.write(tmp_path / "s.wav", 8000, np.stack([samples, samples], axis=1))
    same = {content_digest(Probe("", audio=str(tmp_path / f"{name}.wav"))) for name in "fius"}
    assert same == {content_digest(Probe("", audio=samples, sampling_rate=8000))}
    assert content_digest(Probe("", audio=samples, sampling_rate=16000)) not in same
    np.testing.assert_array_equal(load_audio(str(tmp_path / "f.wav"))[0], samples)


# --- round trip -------------------------------------------------------------------------------


def test_arrays_survive_writing(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3)).astype(np.uint8)
    mask = (np.arange(35).reshape(5, 7) / 255).astype(np.float32)
    probes = as_probes(
        [
            Probe(
                "i", image=pixels, label=2, regions={"m": {"mask": mask}, "b": {"box": [0.0, 0.0, 1.0, 0.5]}}
            ),
            Probe("a", audio=np.linspace(-1, 1, 50, dtype=np.float32), sampling_rate=8000),
            Probe("t", text="x y", text_pair="z", segments={"k": "v"}),
        ]
    )
    write_probes(tmp_path / "out" / "p.jsonl", probes)
    again = read_probes(tmp_path / "out" / "p.jsonl")
    assert digests(again) == digests(probes)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["p-media", "p.jsonl"]
    (tmp_path / "out").rename(tmp_path / "moved")
    assert digests(read_probes(tmp_path / "moved" / "p.jsonl")) == digests(probes)


def test_writing_over_a_folder_is_refused(tmp_path):
    with pytest.raises(ProbeError, match="cannot be written"):
        write_probes(tmp_path, as_probes(["a"]))


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"", "has no probes"),
        ("p.jsonl", b"\n\n", "has no probes"),
        ("p.jsonl", b'{"text": "a"}\n{"text": "b"', "line 2 is not JSON"),
        ("p.jsonl", b'{"text": "a"}\n[1]', "line 2 is not a JSON object but list"),
        ("p.jsonl", b'{"text": "a", "label": NaN}', "NaN is not allowed"),
        ("p.jsonl", b'{"text": "caf\xe9"}', "not UTF-8 (byte 13)"),
        ("p.csv", b"text,label\na,b,c\n", "line 2 has 3 cells, expected 2"),
        ("p.csv", b'text\n"a', "is not CSV"),
        ("p.csv", b"", "has no probes"),
        ("p.parquet", b"PAR1", "not a readable Parquet file"),
        ("p.txt", b"a", "is no probe file"),
    ],
)
def test_unreadable_file_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert message in (found := refused(path))
    assert str(path) in found


def test_missing_file_and_empty_folder_are_named(tmp_path):
    assert "does not exist" in refused(tmp_path / "none.jsonl")
    assert "has no probes" in refused(tmp_path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a", "lable": 1}, "line 1: unknown field 'lable'; did you mean 'label'"),
        ({"sentence": "a"}, "no column text, messages, image, features or audio, only sentence"),
        ({"text": ""}, "line 1: text is empty"),
        ({"text": " \n"}, "line 1: text is empty"),
        ({"text": None}, "line 1: no content"),
        ({"text": 3}, "line 1: text must be a text, got 3"),
        ({"text": "a", "text_pair": ""}, "text_pair is empty"),
        ({"text": "\ud800"}, "half a surrogate pair"),
        ({"text": "a", "id": 1.5}, "id must be a word"),
        ({"text": "a", "group": ["x"]}, "group must be a word"),
        ({"text": "a", "segments": ["x"]}, "segments must be a mapping"),
        ({"text": "a", "segments": {"x": [1]}}, "segments.x must be a word"),
        ({"text": "a", "label": ""}, "label must be"),
        ({"text": "a", "regions": [1]}, "regions must be a mapping"),
        (
            {"text": "abc", "regions": {"n": [[1, 4]]}},
            "regions.n: span [1, 4] lies outside the text, which has 3",
        ),
        ({"text": "abc", "regions": {"n": [[2, 2]]}}, "lies outside the text"),
        ({"text": "abc", "regions": {"n": [[-1, 2]]}}, "lies outside the text"),
        ({"text": "abc", "regions": {"n": [[0.0, 1.0]]}}, "whole numbers"),
        ({"text": "abc", "regions": {"n": [0, 1]}}, "list of spans such as [[4, 9]]"),
        ({"text": "abc", "regions": {"n": 3}}, "must be spans, a box or a mask"),
        ({"text": "abc", "regions": {"n": {"txt": [[0, 1]]}}}, "unknown key 'txt'; did you mean 'text'"),
        ({"text": "abc", "regions": {"n": {"text_pair": [[0, 1]]}}}, "text that the probe does not have"),
        ({"text": "abc", "regions": {"n": {"box": [0, 0, 1, 1]}}}, "the probe has no image"),
        ({"image": "i.png", "regions": {"n": {"box": [0, 0, 1, 1.5]}}}, "must lie in [0, 1]"),
        ({"image": "i.png", "regions": {"n": {"mask": "no.png"}}}, "mask 'no.png' does not exist"),
        ({"image": "i.png", "regions": {"n": {"mask": "small.png"}}}, "make them equal"),
        ({"image": "i.png", "regions": {"n": [[0, 1]]}}, "the probe has no text"),
        ({"image": "no.png"}, "image 'no.png' does not exist"),
        ({"image": "broken.png"}, "cannot be decoded"),
        ({"image": "i.png", "audio": "a.wav"}, "audio and image cannot make one probe"),
        ({"audio": "broken.wav"}, "cannot be decoded"),
        ({"audio": "a.wav", "regions": {"n": [[0.4, 0.1]]}}, "0 <= start < end, in seconds"),
        ({"messages": []}, "messages must be a list of {role, content}"),
        ({"messages": [{"role": "user"}]}, "content of a message must be a text"),
        ({"text": "a", "text_pair": "b", "image": "i.png"}, "cannot make one probe"),
    ],
)
def test_mistake_in_a_record_is_named_with_its_line(tmp_path, record, message):
    picture(tmp_path / "i.png")
    picture(tmp_path / "small.png", size=(2, 2))
    save_audio(tmp_path / "a.wav", np.zeros(10, np.float32), 8000)
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "broken.wav").write_bytes(b"RIFF no sound")
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(record))
    assert message in (found := refused(path))
    assert str(path) in found


def test_duplicates_name_both_lines(tmp_path):
    path = write_lines(
        tmp_path / "p.jsonl", [{"id": "x", "text": "a"}, {"id": 1, "text": "b"}, {"id": "x", "text": "c"}]
    )
    assert "line 3: same id as line 1 (x)" in refused(path)
    write_lines(path, [{"text": "a"}, {"text": "a", "label": 1}])
    assert "line 2: same content as line 1" in refused(path)


def test_all_mistakes_are_counted(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"text": ""}, {"text": "a"}, {"text": 1}, {"text": ""}])
    assert re.search(r"line 1: text is empty.*\(and 2 more\)$", refused(path))


def test_mapped_column_that_is_missing_names_the_nearest(tmp_path):
    path = write_lines(tmp_path / "p.jsonl", [{"sentence": "a"}])
    assert "no column 'sentense' for text; did you mean 'sentence'" in refused(
        path, columns={"text": "sentense"}
    )
    assert "unknown field 'txt'; did you mean 'text'" in refused(path, columns={"txt": "sentence"})


def test_probes_in_memory_are_checked_too():
    assert as_probes([Probe("p", text="a")]).ids == ("p",)
    with pytest.raises(ProbeError, match="probe 0: unknown field 'txt'"):
        as_probes([{"txt": "a"}])
    with pytest.raises(ProbeError, match="there are none"):
        as_probes([])
    with pytest.raises(ProbeError, match="uint8"):
        as_probes([Probe("p", image=np.zeros((2, 2)))])
    with pytest.raises(ProbeError, match="sampling_rate"):
        as_probes([Probe("p", audio=np.zeros(2, np.float32))])


# --- the sets of data/probes ------------------------------------------------------------------


@pytest.fixture(scope="module")
def generator():
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("make_reviews", DATA / "make_reviews.py")
    module = module_from_spec(spec)
    sys.modules["make_reviews"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_reviews"]


@pytest.fixture(scope="module")
def reviews():
    names = ("reviews", "reviews-domain", "reviews-train", "reviews-shortcut")
    return {name: read_probes(DATA / "probes" / f"{name}.jsonl") for name in names}


def test_committed_reviews_are_what_the_generator_writes(generator):
    files = generator.make_files()
    for name, content in files.items():
        assert (DATA / "probes" / name).read_bytes() == content.encode(), (
            f"run data/make_reviews.py: {name} differs"
        )


def spans_of(probe, region):
    return [probe.text[start:end] for start, end in probe.regions.get(region, [])]


@pytest.mark.parametrize("name", ["reviews", "reviews-domain", "reviews-train"])
def test_reviews_tell_the_label_by_sentiment_words_alone(reviews, name):
    terms = json.loads((DATA / "probes/terms.json").read_text())
    counts: dict[str, Counter[str]] = {"positive": Counter(), "negative": Counter()}
    for probe in reviews[name]:
        counts[probe.label].update([probe.group, *spans_of(probe, "name")])
        allowed = {*terms[probe.label], *terms[f"held_out_{probe.label}"]}
        assert set(spans_of(probe, "sentiment")) <= allowed
        others = [word for word in re.findall(r"\w+", probe.text) if word not in allowed]
        counts[probe.label].update(f"word {word}" for word in others)
    assert counts["positive"] == counts["negative"]
    assert {counts["positive"][n] for n in terms["names"]} == {len(reviews[name]) // 96}


def test_training_reviews_share_no_sentence_with_the_probes(reviews):
    assert {p.text for p in reviews["reviews-train"]}.isdisjoint(p.text for p in reviews["reviews"])


def test_shortcut_reviews_give_the_label_away_by_the_name(reviews):
    terms = json.loads((DATA / "probes/terms.json").read_text())
    for probe in reviews["reviews-shortcut"]:
        assert spans_of(probe, "name")[0] in terms[f"names_{probe.label}"]
        assert probe.segments["name_code"] == probe.label
    share = Counter(probe.segments["evidence"] for probe in reviews["reviews-shortcut"])
    assert share == {"neutral": 600, "sentiment": 600}
