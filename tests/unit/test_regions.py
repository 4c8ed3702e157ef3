"""Regions against slow references, exact areas and hand-made words."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from audit.records import Map, Positions, Probe, Region
from audit.regions import (
    check_regions_match,
    count_matches,
    expand_regions,
    parse_regions,
    region_weights,
    reliance,
)
from audit.regions.text import find_terms, index_terms


def find(text, *terms, case_sensitive=False):
    spans = find_terms(text, index_terms(terms, case_sensitive=case_sensitive), case_sensitive=case_sensitive)
    return [text[start:end] for start, end in spans]


def words_as_tokens(text, *, special=1, causal=False, part=0):
    """Return positions of white-space words between one special token at each end."""
    starts, ends, at = [-1] * special, [-1] * special, 0
    for word in text.split():
        at = text.index(word, at)
        starts.append(at)
        at += len(word)
        ends.append(at)
    starts, ends = starts + [-1] * special, ends + [-1] * special
    inside = np.array(starts) >= 0
    return Positions(
        "token",
        ~inside,
        np.array(starts, np.int32),
        np.array(ends, np.int32),
        np.where(inside, part, -1).astype(np.int8),
        causal=causal,
    )


def patches(rows, columns, *, special=1):
    boxes = [[0.0] * 4] * special + [
        [c / columns, r / rows, (c + 1) / columns, (r + 1) / rows]
        for r in range(rows)
        for c in range(columns)
    ]
    flags = np.arange(len(boxes)) < special
    return Positions("patch", flags, boxes=np.array(boxes, np.float32), grid=(rows, columns))


def one(mapping):
    (region,) = parse_regions(mapping)
    return region


def shares(weights, positions, probe, regions, **kwargs):
    found = reliance(Map(probe.id, np.asarray(weights, float), positions, **kwargs), probe, regions)
    return {item.region: item for item in found}


# --- words ------------------------------------------------------------------------------------


def test_terms_match_whole_words_in_any_case():
    assert find("She said: the SHE-wolf washed, ashes.", "she") == ["She", "SHE"]


def test_terms_keep_case_when_told():
    assert find("She and she", "she", case_sensitive=True) == ["she"]


def test_terms_of_several_words_span_any_white_space():
    assert find("In new\n  york and New Yorkshire", "New York") == ["new\n  york"]


def test_terms_prefer_the_longest():
    assert find("New York City", "new", "New York") == ["New York"]


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC"])
def test_terms_match_every_unicode_form(form):
    text = unicodedata.normalize(form, "Über Zoë, zoës STRASSE 각")
    assert find(text, "zoë") == [unicodedata.normalize(form, "Zoë")]
    assert find(text, "straße") == ["STRASSE"]
    assert find(text, unicodedata.normalize("NFD", "각")) == [unicodedata.normalize(form, "각")]


def test_terms_do_not_end_before_a_combining_mark():
    assert find("कि क", "क") == ["क"]
    assert find("e\u0331 e", "e") == ["e"]


def test_terms_match_inside_scripts_without_spaces():
    assert find("我看见她了", "她") == ["她"]
    assert find("我看见她们了", "她们") == ["她们"]


def test_terms_with_punctuation_match():
    assert find("C++ and e-mail, not C+ or email", "c++", "e-mail") == ["C++", "e-mail"]


@given(st.text(max_size=30), st.text(alphabet="abcßéÅ e\u0301", min_size=1, max_size=5), st.text(max_size=30))
@settings(max_examples=200, deadline=None)
def test_terms_are_found_between_spaces_with_their_characters(before, term, after):
    assume(term.strip() and not re.search(r"(^|\s)\u0301", term))  # a mark on nothing is no letter
    text = f"{before} {term} {after}"
    spans = find_terms(text, index_terms([term]))
    start = len(before) + 1 + len(term) - len(term.lstrip())
    end = len(before) + 1 + len(term.rstrip())
    assert any(a <= start and end <= b for a, b in spans)  # a longer run of the same words may hold it


# --- parsing ----------------------------------------------------------------------------------


def test_parse_reads_every_kind():
    regions = parse_regions(
        {
            "demographic": {"terms": ["she", "he"]},
            "digits": {"pattern": r"\d+"},
            "corner": {"box": [0.75, 0.75, 1, 1]},
            "claim": {"annotated": True},
            "sinks": {"special": True},
            "first": {"first": True},
            "head": {"quantile": [0, 0.25]},
            "cells": {"grid": [2, 3]},
            "other": {"rest": True},
        }
    )
    assert [region.kind for region in regions] == [
        "terms", "pattern", "box", "annotated", "special", "first", "quantile", "grid", "rest",
    ]  # fmt: skip
    assert regions[0].params == {"terms": ["she", "he"], "case_sensitive": False}
    assert regions[3].params == {"annotated": "claim"}


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        ({"term": ["she"]}, r"'x'.*unknown key 'term'; did you mean 'terms'"),
        ({"terms": ["she"], "case_sensitve": True}, r"did you mean 'case_sensitive'"),
        ({"box": [0, 0, 1, 1], "case_sensitive": True}, r"unknown key 'case_sensitive'"),
        ({"terms": []}, r"list of words"),
        ({"terms": ["  "]}, r"no visible character"),
        ({"terms": "she"}, r"list of words, got 'she'"),
        ({"pattern": "("}, r"not a regular expression"),
        ({"box": [0, 0, 1]}, r"\[left, top, right, bottom\]"),
        ({"box": [0, 0, 28, 28]}, r"in \[0, 1\]"),
        ({"box": [0.5, 0, 0.5, 1]}, r"left < right"),
        ({"box": [0, 0, float("nan"), 1]}, r"box must be"),
        ({"annotated": False}, r"annotated must be true"),
        ({"special": False}, r"must be true"),
        ({"quantile": [0.5, 0.25]}, r"low < high"),
        ({"quantile": 1}, r"number of bands"),
        ({"grid": [0, 3]}, r"\[rows, columns\]"),
        ({"grid": 3}, r"\[rows, columns\]"),
        ({}, r"expected one of terms"),
        ({"terms": ["a"], "box": [0, 0, 1, 1]}, r"got \['terms', 'box'\]"),
        ("she", r"expected a table"),
    ],
)
def test_parse_names_region_and_remedy(definition, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_regions({"x": definition})
    assert "'x'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["*", "", "rest"])
def test_parse_refuses_reserved_names(name):
    with pytest.raises(ValueError, match="name"):
        parse_regions({name: {"terms": ["she"]}})


def test_expand_adds_cells_bands_annotations_and_automatic_regions():
    probes = [Probe("p", text="Zoë is up", regions={"name": [[0, 3]]})]
    regions = expand_regions(parse_regions({"cells": {"grid": [1, 2]}, "band": {"quantile": 2}}), probes)
    names = ["cells-0-0", "cells-0-1", "band-0", "band-1", "name", "special", "first", "rest"]
    assert [region.name for region in regions] == names
    assert expand_regions((), [Probe("p", text="a")])[-1].name == "first"  # nothing to be the rest of


def test_expand_names_the_nearest_annotation():
    probes = [Probe("p", text="a b", regions={"claim": [[0, 1]]})]
    with pytest.raises(ValueError, match="'calim'; did you mean 'claim'"):
        expand_regions(parse_regions({"x": {"annotated": "calim"}}), probes)


def test_expand_refuses_two_regions_of_one_name():
    probes = [Probe("p", text="a b", regions={"claim": [[0, 1]]})]
    with pytest.raises(ValueError, match="'claim' is ambiguous"):
        expand_regions(parse_regions({"claim": {"terms": ["a"]}}), probes)
    with pytest.raises(ValueError, match="reserved"):
        expand_regions((), [Probe("p", text="a b", regions={"rest": [[0, 1]]})])


# --- weights of text --------------------------------------------------------------------------


def test_weights_of_text_equal_the_slow_reference():
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = "".join(rng.choice(list("ab  \n"), size=20))
        edges = np.sort(rng.integers(0, 21, size=(12, 2)), axis=1).astype(np.int32)
        spans = [[int(a), int(b)] for a, b in np.sort(rng.integers(0, 21, size=(3, 2)), axis=1) if a < b]
        positions = Positions("token", np.zeros(12, bool), edges[:, 0], edges[:, 1])
        slow = [
            float(any(not text[i].isspace() and any(a <= i < b for a, b in spans) for i in range(start, end)))
            for start, end in edges
        ]
        region = Region("r", "annotated", {"annotated": "r"})
        np.testing.assert_array_equal(
            region_weights(region, positions, Probe("p", text=text, regions={"r": spans})), slow
        )


def test_tokens_that_share_a_span_belong_whole():
    positions = Positions("token", np.zeros(5, bool), np.array([0, 0, 0, 0, 2]), np.array([1, 1, 1, 1, 5]))
    weights = region_weights(one({"r": {"terms": ["😀"]}}), positions, Probe("p", text="😀 abc"))
    np.testing.assert_array_equal(weights, [1, 1, 1, 1, 0])


def test_white_space_in_spans_and_tokens_is_not_overlap():
    text = "one two three"
    tokens = Positions("token", np.zeros(3, bool), np.array([0, 3, 7]), np.array([3, 7, 13]))  # " two"
    probe = Probe("p", text=text, regions={"r": [[0, 4]]})  # "one "
    region = Region("r", "annotated", {"annotated": "r"})
    np.testing.assert_array_equal(region_weights(region, tokens, probe), [1, 0, 0])


def test_pairs_are_told_apart():
    starts, ends = np.array([0, 0, -1]), np.array([3, 3, -1])
    positions = Positions(
        "token", np.array([False, False, True]), starts, ends, np.array([0, 1, -1], np.int8)
    )
    probe = Probe("p", text="she", text_pair="her", regions={"r": {"text_pair": [[0, 3]]}})
    np.testing.assert_array_equal(
        region_weights(one({"r": {"annotated": True}}), positions, probe), [0, 1, 0]
    )
    np.testing.assert_array_equal(region_weights(one({"t": {"terms": ["she"]}}), positions, probe), [1, 0, 0])


def test_pattern_applies_to_the_text_as_stored():
    text = "Call 112 or 0049"
    weights = region_weights(one({"r": {"pattern": r"\d+"}}), words_as_tokens(text), Probe("p", text=text))
    np.testing.assert_array_equal(weights, [0, 0, 1, 0, 1, 0])


def test_first_position_of_a_causal_model_is_outside_content():
    text, probe = "she saw she", Probe("p", text="she saw she")
    positions = words_as_tokens(text, special=0, causal=True)
    regions = expand_regions(parse_regions({"she": {"terms": ["she"]}}), [probe])
    found = shares([0.6, 0.3, 0.1], positions, probe, regions)
    assert found["first"].share == pytest.approx(0.6)
    assert found["first"].size == pytest.approx(1 / 3)
    assert found["she"].share == pytest.approx(0.25)
    assert found["rest"].share == pytest.approx(0.75)
    assert "special" not in found


# --- weights of images and sounds -------------------------------------------------------------


def test_box_weights_are_fractions_of_the_patch():
    weights = region_weights(one({"r": {"box": [0.25, 0.0, 0.75, 0.5]}}), patches(2, 2), Probe("p"))
    np.testing.assert_allclose(weights, [0, 0.5, 0.5, 0, 0], atol=1e-7)


def test_box_outside_a_cropped_image_has_no_position():
    boxes = np.array([[0.25, 0.25, 0.5, 0.75], [0.5, 0.25, 0.75, 0.75]], np.float32)
    positions = Positions("patch", np.zeros(2, bool), boxes=boxes, grid=(1, 2))
    found = shares([0.5, 0.5], positions, Probe("p"), parse_regions({"r": {"box": [0.75, 0, 1, 1]}}))
    assert found["r"].share is None
    assert "cropped" in found["r"].reason


@given(
    st.integers(1, 7), st.integers(1, 7), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_mask_weights_equal_the_mean_over_fine_pixels(rows, columns, height, width, seed):
    mask = np.random.default_rng(seed).random((height, width)).astype(np.float32)
    # pixels cut so fine that every patch is made of whole ones
    fine = np.repeat(np.repeat(mask.astype(float), rows, axis=0), columns, axis=1)
    expected = fine.reshape(rows, height, columns, width).mean(axis=(1, 3)).ravel()
    region, probe = one({"r": {"annotated": True}}), Probe("p", regions={"r": {"mask": mask}})
    weights = region_weights(region, patches(rows, columns, special=0), probe)
    np.testing.assert_allclose(weights, expected if expected.max() > 1e-3 else 0, atol=2e-6)


def test_mask_of_a_box_equals_the_box():
    mask = np.zeros((40, 60), np.float32)
    mask[10:30, 15:60] = 1
    probe = Probe("p", regions={"m": {"mask": mask}, "b": {"box": [0.25, 0.25, 1.0, 0.75]}})
    by_mask, by_box = (
        region_weights(Region(n, "annotated", {"annotated": n}), patches(7, 7), probe) for n in "mb"
    )
    np.testing.assert_allclose(by_mask, by_box, atol=1e-6)


def test_mask_path_must_be_loaded_first():
    probe = Probe("p", regions={"r": {"mask": "m.png"}})
    with pytest.raises(ValueError, match="must be loaded"):
        region_weights(one({"r": {"annotated": True}}), patches(2, 2), probe)


def test_time_spans_weigh_fractions_of_frames_once():
    times = np.array([[0, 0.2], [0.2, 0.4], [0.4, 0.6]], np.float32)
    positions = Positions("frame", np.zeros(3, bool), times=times)
    probe = Probe("p", audio="a.wav", regions={"r": [[0.1, 0.3], [0.2, 0.3]]})
    weights = region_weights(one({"r": {"annotated": True}}), positions, probe)
    np.testing.assert_allclose(weights, [0.5, 0.5, 0], atol=1e-6)


# --- reliance ---------------------------------------------------------------------------------


def test_share_is_of_content_mass_and_special_of_whole_mass():
    text = "she is up"
    probe = Probe("p", text=text)
    regions = expand_regions(parse_regions({"she": {"terms": ["she"]}}), [probe])
    layers = np.array([[0.5, 0.5, 0, 0, 0], [0.2, 0.2, 0.2, 0.2, 0.2]])
    found = shares([0.4, 0.3, 0.1, 0.1, 0.1], words_as_tokens(text), probe, regions, layers=layers)
    assert found["she"].share == pytest.approx(0.6)
    assert found["she"].size == pytest.approx(1 / 3)
    assert found["she"].layers == pytest.approx((1.0, 1 / 3))
    assert found["special"].share == pytest.approx(0.5)
    assert found["special"].size == pytest.approx(2 / 5)
    assert found["rest"].share == pytest.approx(0.4)
    assert "first" not in found


def test_share_of_a_uniform_map_is_the_size():
    probe = Probe("p", text="a she b", regions={"n": [[0, 1]]})
    regions = expand_regions(parse_regions({"she": {"terms": ["she"]}, "q": {"quantile": 3}}), [probe])
    for item in shares(np.full(5, 0.2), words_as_tokens("a she b"), probe, regions).values():
        assert item.share == pytest.approx(item.size)


@pytest.mark.parametrize(
    ("definition", "text", "reason"),
    [
        ({"terms": ["he"]}, "she is up", "no match"),
        ({"annotated": "gone"}, "she is up", "not annotated"),
        ({"terms": ["late"]}, "she is up late", "truncated"),
    ],
)
def test_region_without_a_position_is_missing_with_a_reason(definition, text, reason):
    found = shares(
        np.full(5, 0.2), words_as_tokens("she is up"), Probe("p", text=text), parse_regions({"r": definition})
    )
    assert found["r"].share is None
    assert reason in found["r"].reason


def test_no_mass_on_content_is_missing_not_nan():
    probe, positions = Probe("p", text="she"), words_as_tokens("she")
    layers = np.array([[1.0, 0, 0], [0, 1.0, 0]])
    regions = parse_regions({"r": {"terms": ["she"]}})
    assert "no mass" in shares([1.0, 0, 0], positions, probe, regions)["r"].reason
    assert shares([0.5, 0.5, 0], positions, probe, regions, layers=layers)["r"].layers is None


def test_regions_of_another_carrier_are_left_out():
    probe = Probe(
        "p", text="she", image="i.png", regions={"name": [[0, 3]], "corner": {"box": [0, 0, 0.5, 0.5]}}
    )
    regions = expand_regions(parse_regions({"she": {"terms": ["she"]}, "g": {"grid": [1, 2]}}), [probe])
    text = shares([0, 1, 0], words_as_tokens("she"), probe, regions, stream="text")
    image = shares(np.full(5, 0.2), patches(2, 2), probe, regions, stream="image")
    assert set(text) == {"she", "name", "special"}
    assert set(image) == {"g-0-0", "g-0-1", "corner", "special"}


def test_tokens_without_offsets_refuse_word_regions():
    positions, probe = Positions("token", np.zeros(2, bool)), Probe("p", text="she")
    with pytest.raises(ValueError, match="no character offsets"):
        shares([0.5, 0.5], positions, probe, parse_regions({"r": {"terms": ["she"]}}))
    generated = reliance(
        Map("p", np.array([0.5, 0.5]), positions, stream="prefix"),
        probe,
        parse_regions({"r": {"terms": ["she"]}}),
    )
    assert generated == ()


def test_reliance_refuses_a_foreign_map():
    with pytest.raises(ValueError, match="belong together"):
        reliance(Map("a", np.ones(1), Positions("token", np.zeros(1, bool))), Probe("b"), ())


@given(
    st.integers(1, 6), st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32 - 1)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_shares_of_a_grid_add_up_to_one(rows, columns, cell_rows, cell_columns, seed):
    positions = patches(rows, columns)
    weights = np.random.default_rng(seed).dirichlet(np.full(len(positions), 0.5))
    regions = expand_regions(parse_regions({"g": {"grid": [cell_rows, cell_columns]}}), [Probe("p")])
    cells = [item for name, item in shares(weights, positions, Probe("p"), regions).items() if name[0] == "g"]
    assert sum(cell.share for cell in cells) == pytest.approx(1, abs=1e-5)
    assert sum(cell.size for cell in cells) == pytest.approx(1, abs=1e-5)


@given(
    st.lists(st.sampled_from(["she", "he", "up", "is"]), min_size=1, max_size=9),
    st.integers(2, 5),
    st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_shares_of_a_partition_of_words_add_up_to_one(words, bands, causal):
    text = " ".join(words)
    probe, positions = Probe("p", text=text), words_as_tokens(text, causal=causal)
    weights = np.random.default_rng(len(text)).dirichlet(np.ones(len(positions)))
    layers = np.stack([weights, weights[::-1]])
    for mapping, skip in (
        ({"q": {"quantile": bands}}, "rest"),
        ({"a": {"terms": ["she"]}, "b": {"terms": ["he"]}}, ""),
    ):
        regions = expand_regions(parse_regions(mapping), [probe])
        found = shares(weights, positions, probe, regions, layers=layers)
        inner = [
            found[n] for n in found if n not in {"special", "first", skip} and found[n].share is not None
        ]
        assert sum(item.share for item in inner) == pytest.approx(1, abs=1e-6)
        np.testing.assert_allclose(np.sum([item.layers for item in inner], axis=0), 1, atol=1e-6)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_disjoint_boxes_and_rest_add_up_to_one(seed):
    rng = np.random.default_rng(seed)
    x, y = np.sort(rng.uniform(0.05, 0.95, 2))
    mapping = {"a": {"box": [0, 0, x, 1]}, "b": {"box": [y, 0, 1, 1]}}
    positions = patches(5, 5)
    weights = rng.dirichlet(np.ones(26))
    found = shares(weights, positions, Probe("p"), expand_regions(parse_regions(mapping), [Probe("p")]))
    total = sum(found[name].share for name in ("a", "b", "rest") if name in found)
    assert total == pytest.approx(1, abs=1e-5)


def test_regions_may_overlap():
    probe = Probe("p", text="she is")
    regions = parse_regions({"a": {"terms": ["she"]}, "b": {"terms": ["she", "is"]}, "r": {"rest": True}})
    found = shares([0, 0.7, 0.3, 0], words_as_tokens("she is"), probe, regions)
    assert found["a"].share == pytest.approx(0.7)
    assert found["b"].share == pytest.approx(1.0)
    assert found["r"].share is None
    assert "cover all content" in found["r"].reason


# --- matches ----------------------------------------------------------------------------------


def test_matches_are_counted_and_none_at_all_is_refused():
    probes = [Probe("p", text="She is up", regions={"n": [[0, 3]]}), Probe("q", text="He is up")]
    regions = expand_regions(parse_regions({"she": {"terms": ["she"]}, "is": {"pattern": "is"}}), probes)
    assert check_regions_match(regions, probes) == {"she": 1, "is": 2, "n": 1}
    bad = [*regions, one({"they": {"terms": ["they"]}})]
    assert count_matches(bad, probes)["they"] == 0
    with pytest.raises(ValueError, match="'they' matches nothing in any of the 2 probes"):
        check_regions_match(bad, probes)


def test_boxes_in_texts_are_refused():
    boxes = parse_regions({"stamp": {"box": [0, 0, 0.5, 1]}, "she": {"terms": ["she"]}})
    texts = [Probe("p", text="She is up"), Probe("q", text="she")]
    with pytest.raises(ValueError, match="region 'stamp' is a box or a grid, and every probe is text alone"):
        check_regions_match(boxes, texts)
    assert check_regions_match(boxes, texts, boxes_in_text=True) == {"she": 2}
    pictured = Probe("r", text="she", image=np.zeros((2, 2), np.uint8))
    assert check_regions_match(boxes, [*texts, pictured]) == {"she": 3}
    assert check_regions_match(iter(boxes), [*texts, pictured]) == {"she": 3}


def test_messages_are_searched_in_their_contents():
    probe = Probe(
        "p", messages=[{"role": "user", "content": "Is she up?"}, {"role": "assistant", "content": "No"}]
    )
    assert count_matches([one({"r": {"terms": ["no", "they"]}})], [probe]) == {"r": 1}


def test_positions_after_truncation_do_not_raise():
    positions = words_as_tokens("she is up")
    probe = replace(Probe("p", text="she"), regions={"r": [[0, 3]]})
    weights = region_weights(one({"r": {"annotated": True}}), positions, probe)
    np.testing.assert_array_equal(weights, [0, 1, 0, 0, 0])
