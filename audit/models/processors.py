"""Load the tokenizer, image processor or feature extractor that belongs to a loaded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.auto_mappings import PROCESSOR_MAPPING_NAMES

from audit.models import digests as files
from audit.models.loading import LOCK, Loaded, Request, explained, quietly


def load_processor(request: Request, home: Path, loaded: Loaded) -> Any:
    """Return the tokenizer, image processor, feature extractor or combined processor of a model.

    Raises
    ------
    CheckpointError
        When it is missing or does not fit the model.
    """
    kind = _processor_kind(home, loaded)
    wanted = {
        "AutoTokenizer": "tokenizer",
        "AutoImageProcessor": "image processor",
        "AutoFeatureExtractor": "feature extractor",
        "AutoProcessor": "processor",
    }[kind]
    remedy = f"save the {wanted} into the same directory"
    if kind == "AutoTokenizer" and not files.matching(home, files.TOKENIZER_FILES):
        raise request.error(f"no tokenizer files; {remedy}")
    with LOCK, quietly(), explained(request, f"its {wanted} cannot be loaded", remedy):
        processor = getattr(transformers, kind).from_pretrained(
            home, trust_remote_code=request.trust_remote_code, local_files_only=True
        )
    _check_vocabulary(request, processor, loaded.model)
    return processor


def _processor_kind(home: Path, loaded: Loaded) -> str:
    model_input = loaded.model.main_input_name
    has_text = bool(files.matching(home, files.TOKENIZER_FILES))
    combined = loaded.model.config.model_type in PROCESSOR_MAPPING_NAMES
    has_processor = bool(files.matching(home, files.PROCESSOR_FILES))
    if has_text and has_processor and (combined or "encoder-decoder" in loaded.model.config.model_type):
        return "AutoProcessor"
    if model_input in ("input_values", "input_features"):
        return "AutoFeatureExtractor"
    return "AutoImageProcessor" if model_input == "pixel_values" else "AutoTokenizer"


def _check_vocabulary(request: Request, processor: Any, model: Any) -> None:
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "all_special_tokens"):
        return
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise request.error("its tokenizer has no vocabulary; save the tokenizer into the same directory")
    table = getattr(model.config.get_text_config(), "vocab_size", None)
    if table is not None and tokenizer.vocab_size > table:
        raise request.error(
            f"its tokenizer has {tokenizer.vocab_size} tokens, its model {table}; "
            "save the tokenizer that belongs to this model"
        )
