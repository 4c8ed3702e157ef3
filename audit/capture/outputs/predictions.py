"""What the checkpoint answered: logits, predicted class, target class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from audit._method_parameters import check_target
from audit.capture.inputs.encoded import Encoded, core_model
from audit.capture.outputs.scores import Difference, Score, is_pair
from audit.capture.outputs.spans import (
    answer_ends,
    answer_score,
    answer_text,
    best_answer,
    interleaved,
    span_classes,
)
from audit.errors import CaptureError, ConfigError, ProbeError
from audit.records import Checkpoint, Prediction, Probe

Target = str | int | Sequence[str | int | None] | Mapping[str, str | int | None] | None
LANGUAGE = ("causal-lm", "masked-lm")
GENERATES = (*LANGUAGE, "seq2seq-lm", "speech-seq2seq", "image-text-to-text")
ANSWERS = "question-answering"
CLASSIFICATION = ("sequence-classification", "image-classification", "visual-question-answering")


def class_names(checkpoint: Checkpoint, size: int) -> list[str]:
    """Return the class names of a head with `size` logits, from the config's ``id2label``."""
    names = getattr(core_model(checkpoint.model).config, "id2label", None) or {}
    return [str(names.get(i, names.get(str(i), f"LABEL_{i}"))) for i in range(size)]


def targets_by_probe(target: Target, probes: Sequence[Probe]) -> dict[str, Any]:
    """Return the wanted class of each probe id: a name, an index, or None.

    Parameters
    ----------
    target : "label", a class name, an index, two names, a list in the order of the probes, a mapping, or None
        ``label`` takes each probe's own label; two names mean the difference of their logits.

    Raises
    ------
    ConfigError
        When a target is neither a name nor an index, or both of two names are the same.
    ProbeError
        When there is not one target for each probe.
    """
    try:
        check_target(target)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if isinstance(target, Mapping):
        return {probe.id: _wanted(target.get(probe.id)) for probe in probes}
    if is_pair(target):
        return {probe.id: _wanted(target) for probe in probes}
    if target is not None and not isinstance(target, (str, int)):
        if len(target) != len(probes):
            raise ProbeError(f"{len(target)} targets for {len(probes)} probes; give one for each")
        return {probe.id: _wanted(one) for probe, one in zip(probes, target, strict=True)}
    return {probe.id: probe.label if target == "label" else target for probe in probes}


def _wanted(target: Any) -> Any:
    return Difference(*target) if is_pair(target) else target


def check_targets(checkpoint: Checkpoint, wanted: Mapping[str, Any], probes: Sequence[Probe]) -> None:
    """Raise ProbeError for the first probe whose target class or token the checkpoint does not know."""
    names = getattr(core_model(checkpoint.model).config, "id2label", None) or {}
    if checkpoint.has_head and checkpoint.task in CLASSIFICATION and len(names) > 1:
        for probe in probes:
            class_score(wanted[probe.id], class_names(checkpoint, len(names)), probe)
    if checkpoint.has_head and checkpoint.task in GENERATES:
        _check_tokens(_vocabulary_size(core_model(checkpoint.model)), wanted)


def _vocabulary_size(model: Any) -> int:
    head = model.get_output_embeddings()  # BLIP's captioner does not say which it is
    return (
        len(head.weight) if head is not None else int(model.config.get_text_config(decoder=True).vocab_size)
    )


def _check_tokens(size: int, wanted: Mapping[str, Any]) -> None:
    for probe_id, target in wanted.items():
        for one in target if isinstance(target, Difference) else [target]:
            if isinstance(one, int) and not 0 <= one < size:
                raise ConfigError(
                    f"probe {probe_id}: target {one} is no token of the checkpoint, whose ids are 0 to "
                    f"{size - 1}; mend target"
                )


def known_class(wanted: str | int, names: Sequence[str]) -> int | None:
    """Return the index of a class by its name, its index, or its index as text; None for no class.

    >>> known_class("no", ["yes", "no"]), known_class(0, ["yes", "no"]), known_class("2", ["yes", "no"])
    (1, 0, None)
    """
    if wanted in names:
        return list(names).index(str(wanted))
    is_index = isinstance(wanted, int) or (isinstance(wanted, str) and wanted.isdecimal())
    return int(wanted) if is_index and 0 <= int(wanted) < len(names) else None


def class_index(wanted: Any, names: Sequence[str], probe: Probe) -> int | None:
    """Return the index of a class that is given by name or index, None where there is no one class.

    Raises
    ------
    ProbeError
        When the class does not exist.
    """
    if wanted is None or isinstance(wanted, (float, list, tuple, dict)):
        return None
    index = known_class(wanted, names)
    if index is not None:
        return index
    known = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    raise ProbeError(
        f"probe {probe.id}: class {wanted!r} is not among the checkpoint's ({known}); mend label or target"
    )


def class_score(wanted: Any, names: Sequence[str], probe: Probe) -> Score | None:
    """Return the score of what is wanted: a class, the difference of two, or the mean of several labels.

    Raises
    ------
    ProbeError
        When a class does not exist.
    """
    if isinstance(wanted, Score):
        return wanted
    if isinstance(wanted, Difference):
        one, two = (class_index(each, names, probe) for each in wanted)
        return None if one is None or two is None else Score.difference((names[one], names[two]), (one, two))
    if isinstance(wanted, (list, tuple)):
        indices = [
            index for index in (class_index(each, names, probe) for each in wanted) if index is not None
        ]
        return Score.mean(", ".join(names[i] for i in indices), indices) if indices else None
    index = class_index(wanted, names, probe)
    return None if index is None else Score.single(names[index], index)


def predictions(
    checkpoint: Checkpoint,
    encoded: Sequence[Encoded],
    outputs: Any,
    wanted: Mapping[str, Any],
    row_indices: Tensor,
    *,
    labelled: bool = False,
) -> list[Prediction]:
    """Read the predictions of one batch.

    Parameters
    ----------
    checkpoint : Checkpoint
    encoded : the batch
    outputs : what the model returned
    wanted : target class of each probe id
    row_indices : int Tensor (batch,)
        Position whose token a language model predicts.
    labelled : bool
        Whether labelled spans are read, so that the classes of these are the prediction.

    Raises
    ------
    CaptureError
        When logits are NaN or infinite.
    """
    logits = getattr(outputs, "logits", None)
    check_finite(encoded, logits if logits is not None else first_tensor(outputs))
    if checkpoint.has_head and checkpoint.task == ANSWERS and hasattr(outputs, "start_logits"):
        return _answers(encoded, outputs, wanted)
    if not checkpoint.has_head or logits is None:
        return [_plain(item) for item in encoded]
    if checkpoint.task in LANGUAGE:
        return _tokens(checkpoint, encoded, logits, wanted, row_indices)
    if logits.dim() == 3 and checkpoint.task == "token-classification":
        return _entities(checkpoint, encoded, logits, wanted, labelled)
    if logits.dim() != 2:
        return [_plain(item) for item in encoded]
    names = class_names(checkpoint, logits.shape[1])
    values, several = logits.double().cpu(), has_several_labels(checkpoint)
    return [
        _classified(item, row, names, wanted[item.probe.id], several=several)
        for item, row in zip(encoded, values, strict=True)
    ]


def check_finite(encoded: Sequence[Encoded], logits: Tensor) -> None:
    """Raise CaptureError naming the first probe whose logits (or last states) are NaN or infinite."""
    finite = torch.isfinite(logits).flatten(1).all(dim=1)
    if not bool(finite.all()):
        probe = encoded[int((~finite).nonzero()[0])].probe
        raise CaptureError(
            f"probe {probe.id}: the checkpoint's output is NaN or infinite; its weights are "
            "damaged or its dtype "
            "overflows: load it in float32"
        )


def first_tensor(outputs: Any) -> Tensor:
    """Return the logits, or the last hidden states of a backbone."""
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    found = next((value for value in values if isinstance(value, Tensor)), None)
    if found is None:
        raise CaptureError(f"{type(outputs).__name__} holds neither logits nor hidden states")
    return found


def _plain(item: Encoded, **fields: Any) -> Prediction:
    label = fields.pop("label", None)
    if label is None and isinstance(item.probe.label, (str, int)):
        label = str(item.probe.label)
    elif label is None and isinstance(item.probe.label, (list, tuple)):
        label = ", ".join(map(str, item.probe.label))
    return Prediction(item.probe.id, label=label, tokens=len(item), truncated=item.truncated, **fields)


def _classified(
    item: Encoded, logits: Tensor, names: Sequence[str], wanted: Any, *, several: bool = False
) -> Prediction:
    single = len(names) == 1  # a regression has a number, not a class
    only = Score.single(names[0], 0) if wanted is not None else None
    target = only if single else class_score(wanted, names, item.probe)
    predicted = None if single else names[int(logits.argmax())]
    if several:  # every label whose sigmoid is above one half
        predicted = ", ".join(name for name, logit in zip(names, logits.tolist(), strict=True) if logit > 0)
    return _plain(
        item,
        logits=tuple(logits.tolist()),
        predicted=predicted,
        **_target(target, logits),
        label=None if single else _known_label(item.probe.label, names),
    )


def _target(target: Score | None, logits: Tensor) -> dict[str, Any]:
    if target is None:
        return {}
    return {"target": target.name, "target_logit": float(target.of(logits[None])[0])}


def has_several_labels(checkpoint: Checkpoint) -> bool:
    """Return whether each class is a label of its own, with a sigmoid instead of a softmax."""
    kind = getattr(core_model(checkpoint.model).config, "problem_type", None)
    return checkpoint.task in CLASSIFICATION and kind == "multi_label_classification"


def _answers(encoded: Sequence[Encoded], outputs: Any, wanted: Mapping[str, Any]) -> list[Prediction]:
    logits, found = interleaved(outputs).double().cpu(), []
    for i, item in enumerate(encoded):
        best = best_answer(item, outputs.start_logits[i], outputs.end_logits[i])
        target = wanted[item.probe.id]
        if target is not None and not isinstance(target, Score):
            target = answer_score(item, answer_ends(item, target, outputs, i))
        found.append(_plain(item, predicted=answer_text(item, best), **_target(target, logits[i])))
    return found


def _entities(
    checkpoint: Checkpoint,
    encoded: Sequence[Encoded],
    logits: Tensor,
    wanted: Mapping[str, Any],
    labelled: bool,
) -> list[Prediction]:
    names, values, found = class_names(checkpoint, logits.shape[2]), logits.double().cpu(), []
    for item, row in zip(encoded, values, strict=True):
        target = wanted[item.probe.id]
        fields = _target(target, row.flatten()) if isinstance(target, Score) else {}
        spans = span_classes(item, row, names) if labelled else []
        if spans:
            fields["label"], fields["predicted"] = (", ".join(each) for each in zip(*spans, strict=True))
        found.append(_plain(item, **fields))
    return found


def _known_label(label: Any, names: Sequence[str]) -> str | None:
    is_index = isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(names)
    return names[label] if is_index else None


def _tokens(
    checkpoint: Checkpoint,
    encoded: Sequence[Encoded],
    logits: Tensor,
    wanted: Mapping[str, Any],
    rows: Tensor,
) -> list[Prediction]:
    tokenizer = getattr(checkpoint.processor, "tokenizer", checkpoint.processor)
    if logits.shape[1] > 1:
        logits = logits[torch.arange(len(logits)), rows.to(logits.device)][:, None]
    found = []
    for item, row in zip(encoded, logits[:, 0].double().cpu(), strict=True):
        target = token_score(tokenizer, wanted[item.probe.id], item.probe)
        found.append(_plain(item, predicted=token_name(tokenizer, int(row.argmax())), **_target(target, row)))
    return found


def token_name(tokenizer: Any, token: int) -> str:
    """Return the text of a token, its number where there is no tokenizer, as beside a feature extractor."""
    return str(tokenizer.decode([token])) if hasattr(tokenizer, "decode") else f"token {token}"


def token_score(tokenizer: Any, wanted: Any, probe: Probe) -> Score | None:
    """Return the score of a token, or of the difference of two, such as ``("Yes", "No")``.

    Raises
    ------
    ProbeError
        When one is not a single token.
    """
    if wanted is None or isinstance(wanted, Score):
        return wanted
    if isinstance(wanted, Difference):
        one, two = (_single_token(tokenizer, each, probe) for each in wanted)
        return Score.difference((str(wanted.wanted), str(wanted.other)), (one, two))
    token = _single_token(tokenizer, wanted, probe)
    return Score.single(token_name(tokenizer, token), token)


def _single_token(tokenizer: Any, wanted: Any, probe: Probe) -> int:
    found = token_id(tokenizer, wanted, probe)
    if found is None:
        raise ProbeError(f"probe {probe.id}: target None is no token; name one")
    return found


def token_id(tokenizer: Any, wanted: Any, probe: Probe) -> int | None:
    """Return the id of a token that is given by id or text; ProbeError unless it is a single token."""
    if wanted is None or isinstance(wanted, int):
        return wanted
    ids = tokenizer(str(wanted), add_special_tokens=False)["input_ids"]
    unknown = getattr(tokenizer, "unk_token_id", None)
    if len(ids) == 1 and ids[0] == unknown and wanted != tokenizer.unk_token:
        raise ProbeError(
            f"probe {probe.id}: target {wanted!r} is no token of the checkpoint; choose one that it knows"
        )
    if len(ids) != 1:
        raise ProbeError(
            f"probe {probe.id}: target {wanted!r} is {len(ids)} tokens, expected 1; choose a single token"
        )
    return int(ids[0])
