"""The public names: they resolve, they are documented, and their signatures keep the contract."""

import inspect
import re

import pytest

import audit

CALLABLES = sorted(set(audit.__all__) - {"__version__"})
CONTRACT = {
    "attention_rollout": (
        "attentions, *, head_fusion='mean', residual=0.5, discard_ratio=0.0, top_k=None, start_layer=0, "
        "normalize=True"
    ),
    "per_head_rollout": "attentions, *, residual=0.5",
    "attention_flow": "attentions, *, rows=None, residual=0.5",
    "gradient_rollout": "attentions, gradients, *, form='relevance'",
    "encoder_decoder_rollout": "encoder, decoder, cross, *, residual=0.5, cross_residual=0.5",
    "encoder_decoder_relevance": (
        "encoder, decoder, cross, encoder_grad, decoder_grad, cross_grad, *, normalize=True"
    ),
    "load_checkpoint": "ref, *, device='auto', dtype=None, adapter=None",
    "compute_maps": "checkpoint, probes, *, method='rollout', row='auto', target=None",
    "compute_reliance": "checkpoint, probes, regions",
    "js_distance": "p, q",
    "js_divergence": "p, q",
    "wasserstein": "p, q",
    "compare_maps": (
        "before, after, *, regions=None, replicates=(), groups=None, paired=True, alpha=0.05, "
        "resamples=9999, seed=0"
    ),
    "replicate_test": "shift, replicate_shifts, *, alternative='two-sided', alpha=0.05, power=0.8",
    "evaluate_gate": "comparison, policy",
}


def docs_referred_to(doc: str) -> str:
    """Return the docstrings of the public functions that a docstring refers to."""
    names = [path.rpartition(".")[2] for path in re.findall(r":func:`([^`]+)`", doc)]
    return " ".join(inspect.getdoc(getattr(audit, name)) or "" for name in names if name in audit.__all__)


@pytest.mark.parametrize("name", CALLABLES)
def test_public_name_resolves_and_is_documented(name):
    thing = getattr(audit, name)
    assert callable(thing)
    assert thing.__name__ == name
    doc = inspect.getdoc(thing) or ""
    summary = doc.partition("\n")[0]
    assert summary.endswith("."), f"{name}: the first line of its docstring is no sentence"
    words = set(re.findall(r"\w+", doc + docs_referred_to(doc)))
    missing = [key for key in inspect.signature(thing).parameters if key not in words]
    assert not missing, f"{name}: its docstring says nothing about {missing}"


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_public_signature_keeps_the_contract(name):
    namespace: dict[str, object] = {}
    exec(f"def promised({CONTRACT[name]}): ...", namespace)
    promised = inspect.signature(namespace["promised"]).parameters
    actual = inspect.signature(getattr(audit, name)).parameters
    for key, parameter in promised.items():
        assert key in actual, f"{name} lost its argument {key}"
        if parameter.default is not inspect.Parameter.empty:
            assert actual[key].default == parameter.default, f"{name}({key}=...)"
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert actual[key].kind is inspect.Parameter.KEYWORD_ONLY, f"{name}: {key} must be keyword-only"
    positional = [k for k, p in actual.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    extra = [k for k in positional if k not in promised and actual[k].default is inspect.Parameter.empty]
    assert not extra, f"{name} gained required arguments: {extra}"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = audit.nonsense


def test_dir_lists_the_public_names():
    assert set(audit.__all__) <= set(dir(audit))
    assert len(audit.__all__) == len(set(audit.__all__))
