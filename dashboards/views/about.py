"""Methods & limits: what the map means and does not mean, in plain words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import streamlit as st

from dashboards import blocks, data, downloads

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
    "raw_attention": "The attention of one layer as it is, without what lies below it.",
    "per_head_rollout": "Rollout of single heads of a layer, instead of their average.",
    "attention_flow": "The largest flow from each input to the output through the layers (Abnar & "
    "Zuidema 2020).",
    "gradient_rollout": "Attention weighted by how much it matters to one answer (Chefer et al. 2021).",
    "norms": "How large what each position adds in a layer is, not only how it is weighted; multiplied like "
    "rollout (Kobayashi et al. 2021).",
    "globenc": "Norms, seen through the layer's last normalisation as well (Modarressi et al. 2022).",
    "alti": "How much nearer each contribution brings a layer's output; multiplied like rollout (Ferrando "
    "et al. 2022).",
    "value_zeroing": "How far a layer's output turns without what one position gives (Mohebbi et al. 2023).",
    "input_x_gradient": "How steeply one answer depends on each position, times what stands there.",
    "integrated_gradients": "The same, averaged on the way from an empty input (Sundararajan et al. 2017).",
    "occlusion": "By how much one answer falls when a position is hidden (Zeiler & Fergus 2014).",
    "shap": "What a position adds to one answer, averaged over orders of adding them (Lundberg & Lee 2017).",
    "lime": "A straight line through the answers to many partly hidden inputs (Ribeiro et al. 2016).",
    "grad_cam": "Which positions look, at one depth, like what favours one answer (Selvaraju et al. 2017).",
    "lrp": "One answer shared out backwards, layer by layer, without loss (Ali et al. 2022).",
}


def page() -> None:
    """Draw the explanations."""
    st.title("Methods & limits", anchor=False)
    blocks.html(f'<div class="plain">{blocks.page_text("about_map")}</div>')
    st.header("What the verdicts mean", anchor=False)
    _table("verdicts-meaning", ("verdict", "meaning"), VERDICTS, blocks.badge)
    st.header("What a map cannot tell", anchor=False)
    blocks.html(f'<div class="plain">{blocks.page_text("about_limits")}</div>')
    with blocks.section("Methods in this store"):
        _methods()
    st.header("Words", anchor=False)
    _table("words", ("word", "meaning"), WORDS)


WORDS = tuple(sorted(blocks.GLOSSARY.items(), key=lambda item: item[0].casefold()))


def _methods() -> None:
    names = sorted({str(one["spec"]["method"]["name"]) for one in data.runs().manifests})
    if not names:
        blocks.note("No run yet.")
        return
    found = [
        (name, METHODS.get(name, "Made elsewhere and imported; not a method of this tool.")) for name in names
    ]
    _table("methods", ("method", "how the map is made"), found)


def _table(
    name: str,
    head: tuple[str, str],
    body: Sequence[tuple[str, str]],
    shown: Callable[[str], str] = lambda word: f"<b>{blocks.text(word, 60)}</b>",
) -> None:
    """Draw a table of words and what they mean, and offer it as a file."""
    import polars as pl

    blocks.html(blocks.table(head, [(shown(word), blocks.text(what)) for word, what in body]))
    downloads.table(name, pl.DataFrame(list(body), schema=list(head), orient="row"))
