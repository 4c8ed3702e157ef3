"""Methods & limits: what the map means and does not mean, in plain words."""

from __future__ import annotations

import streamlit as st

from audit.report.wording import clip
from dashboards import blocks, data

MAP = """
<h4>What is looked at</h4>
<p>A transformer reads its input in pieces: words of a text, patches of an image, short spans of a sound. In every
layer, <em>attention</em> says how much each piece takes from each other piece. Multiplying the layers together gives
one <b>map</b>: for a given output, how its attention is spread over the input. All shares of a map add up to 1.</p>
<h4>What is compared</h4>
<p>Two checkpoints see the same fixed inputs, the <b>probes</b>. For every <b>region</b> that was named beforehand (the
names in a review, the corner of an image) its <b>share</b> of the map is taken before and after. The difference is
the <b>shift</b>.</p>
<h4>What a shift is held against</h4>
<ul><li>A <b>limit</b> that your policy sets: “no more than .02 on names”.</li>
<li>What <b>harmless re-trainings</b> do. The same recipe with another random seed also moves the map. That spread is
the <b>noise floor</b>; a shift inside it says nothing about this checkpoint.</li></ul>
"""
VERDICTS = (
    ("PASS", "Every rule's interval lies inside what is allowed."),
    (
        "FAIL",
        "At least one rule's interval lies outside: the map moved by more than the policy allows or re-training explains.",
    ),
    (
        "INCONCLUSIVE",
        "The data cannot tell. The page says what would settle it: more probes, or more re-trainings.",
    ),
    ("ERROR", "Something could not be judged at all, for example two passes over one input that disagree."),
)
LIMITS = """
<ul>
<li><b>A map is not a cause.</b> “The attention map moved” does not say that the model now <em>relies</em> on the region.
Only hiding the region and watching the answer (occlusion) shows that; where it was done, the comparison says so.</li>
<li><b>Attention is not everything.</b> A changed classification head, value path or feed-forward block leaves the map as
it was. Identical maps of different weights are therefore never a PASS.</li>
<li><b>Long stacks blur.</b> Multiplying many layers spreads the map out; the layer plot shows where a shift begins.</li>
<li><b>The first word of a causal model</b> collects attention without any meaning. It is kept as a region of its own,
<em>first</em>, outside the content. So are special tokens such as [CLS].</li>
<li><b>Only these probes.</b> An input that is not among the probes may still move.</li>
<li><b>Regions come first.</b> Picking the words that moved most after looking would always find a shift; filters on
these pages are for understanding, not for judging.</li>
</ul>
"""
METHODS = {
    "rollout": "Attention of all layers multiplied, half of each layer's input passed straight on (Abnar & Zuidema 2020).",
    "attention_flow": "The largest flow from each input to the output through the layers (Abnar & Zuidema 2020).",
    "gradient_rollout": "Attention weighted by how much it matters to one answer (Chefer et al. 2021).",
    "per_head_rollout": "Rollout of single heads of a layer, instead of their average.",
    "raw_attention": "The attention of one layer as it is, without what lies below it.",
}


def page() -> None:
    """Draw the explanations."""
    st.title("Methods & limits", anchor=False)
    blocks.html(f'<div class="plain">{MAP}</div>')
    st.subheader("What the verdicts mean", anchor=False)
    blocks.html(blocks.table(("", ""), [(blocks.badge(name), blocks.text(what)) for name, what in VERDICTS]))
    st.subheader("What a map cannot tell", anchor=False)
    blocks.html(f'<div class="plain">{LIMITS}</div>')
    _methods()
    st.subheader("Words", anchor=False)
    blocks.html(blocks.table(("word", "meaning"), [(f"<b>{k}</b>", blocks.text(v)) for k, v in GLOSSARY]))


GLOSSARY = tuple(sorted(blocks.GLOSSARY.items(), key=lambda item: item[0].casefold()))


def _methods() -> None:
    st.subheader("Methods in this store", anchor=False)
    names = sorted({str(one["spec"]["method"]["name"]) for one in data.runs().manifests})
    if not names:
        blocks.note("No run yet.")
        return
    body = [
        (f"<b>{blocks.text(n, 60)}</b>", blocks.text(METHODS.get(n, "See the documentation of this method.")))
        for n in names
    ]
    blocks.html(blocks.table(("method", "how the map is made"), body))


def short_note() -> None:
    """Say in one line what a map is, where one is shown."""
    blocks.note(
        "The map shows where attention goes, layer upon layer. It does not prove what the answer depends on; "
        f"{clip('see Methods & limits.', 60)}"
    )
