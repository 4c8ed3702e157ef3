"""Methods & limits: what the map means and does not mean, in plain words."""

from __future__ import annotations

import streamlit as st

from dashboards import blocks, data

VERDICTS = (
    ("PASS", "Every rule's interval lies inside what is allowed."),
    (
        "FAIL",
        "At least one rule failed: the interval lies outside the limit, or the map moved by more than "
        "harmless re-training does and by at least the effect floor.",
    ),
    (
        "INCONCLUSIVE",
        "The data cannot tell. The page says what would settle it: more probes, or more re-trainings.",
    ),
    ("ERROR", "Something could not be judged at all, for example two passes over one input that disagree."),
)
METHODS = {
    "rollout": "Attention of all layers multiplied, half of each layer's input passed straight on "
    "(Abnar & Zuidema 2020).",
    "attention_flow": "The largest flow from each input to the output through the layers (Abnar & "
    "Zuidema 2020).",
    "gradient_rollout": "Attention weighted by how much it matters to one answer (Chefer et al. 2021).",
    "per_head_rollout": "Rollout of single heads of a layer, instead of their average.",
    "raw_attention": "The attention of one layer as it is, without what lies below it.",
}


def page() -> None:
    """Draw the explanations."""
    st.title("Methods & limits", anchor=False)
    blocks.html(f'<div class="plain">{blocks.page_text("about_map")}</div>')
    st.header("What the verdicts mean", anchor=False)
    blocks.html(
        blocks.table(
            ("verdict", "meaning"), [(blocks.badge(name), blocks.text(what)) for name, what in VERDICTS]
        )
    )
    st.header("What a map cannot tell", anchor=False)
    blocks.html(f'<div class="plain">{blocks.page_text("about_limits")}</div>')
    _methods()
    st.header("Words", anchor=False)
    blocks.html(blocks.table(("word", "meaning"), [(f"<b>{k}</b>", blocks.text(v)) for k, v in GLOSSARY]))


GLOSSARY = tuple(sorted(blocks.GLOSSARY.items(), key=lambda item: item[0].casefold()))


def _methods() -> None:
    st.header("Methods in this store", anchor=False)
    names = sorted({str(one["spec"]["method"]["name"]) for one in data.runs().manifests})
    if not names:
        blocks.note("No run yet.")
        return
    body = [
        (f"<b>{blocks.text(n, 60)}</b>", blocks.text(METHODS.get(n, "See the documentation of this method.")))
        for n in names
    ]
    blocks.html(blocks.table(("method", "how the map is made"), body))
