"""Which task a model class serves, from its name; imports neither torch nor transformers."""

from __future__ import annotations

BACKBONE = "backbone"
COMPARES = "zero-shot-image-classification"
"""The task of two towers: their only output is how alike image and text are."""

_ENDINGS = (
    ("ForSequenceClassification", "sequence-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForMultipleChoice", "multiple-choice"),
    ("ForMaskedLM", "masked-lm"),
    ("MarianMTModel", "seq2seq-lm"),
    ("WithLMHeadModel", "masked-lm"),
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForImageClassification", "image-classification"),
    ("ForImageClassificationWithTeacher", "image-classification"),
    ("ForCTC", "ctc"),
    ("ForSpeechSeq2Seq", "speech-seq2seq"),
    ("ForAudioClassification", "audio-classification"),
    ("VisionEncoderDecoderModel", "image-text-to-text"),
    ("SpeechEncoderDecoderModel", "speech-seq2seq"),
    ("EncoderDecoderModel", "seq2seq-lm"),
    ("ForConditionalGeneration", "seq2seq-lm"),
)
_DUAL_ENCODERS = frozenset(
    {
        "Aimv2Model",
        "AlignModel",
        "AltCLIPModel",
        "BlipModel",
        "ChineseCLIPModel",
        "CLIPModel",
        "CLIPSegModel",
        "MetaClip2Model",
        "OwlViTModel",
        "Owlv2Model",
        "SiglipModel",
        "Siglip2Model",
        "VisionTextDualEncoderModel",
    }
)
MODALITIES = {
    "sequence-classification": "text",
    "token-classification": "text",
    "masked-lm": "text",
    "causal-lm": "text",
    "seq2seq-lm": "text",
    "image-classification": "image",
    "audio-classification": "audio",
    "ctc": "audio",
    "speech-seq2seq": "audio",
}
"""What a model of that task reads where it reads one modality; tasks that do not tell are left out."""
_ANSWER_CLASSES = frozenset({"vilt", "visual_bert"})
"""Model types whose head for questions chooses among the labels of the config, not a span of the text."""
_SPEECH = frozenset({"whisper", "speech_to_text", "moonshine", "speecht5", "seamless_m4t"})
_CLASSIFIERS = frozenset(
    {
        "sequence-classification",
        "token-classification",
        "image-classification",
        "audio-classification",
        "visual-question-answering",
    }
)
_SPEECH_ENCODERS = ("audio", "data2vec-audio", "hubert", "sew", "unispeech", "wav2vec2", "wavlm", "whisper")


def task_of(architecture: str | None, model_type: str | None = None, *, vision_config: bool = False) -> str:
    """Return the task of a model class; ``backbone`` for one without a task head.

    Parameters
    ----------
    architecture : str or None
        Class name as in config.json's ``architectures``.
    model_type : str, optional
        Settles what the name leaves open, such as generation from speech.
    vision_config : bool
        Whether the config has an image part.

    Returns
    -------
    str

    Examples
    --------
    >>> task_of("BertForSequenceClassification"), task_of("GPT2LMHeadModel"), task_of("ViTModel")
    ('sequence-classification', 'causal-lm', 'backbone')
    >>> task_of("BertForQuestionAnswering"), task_of("ViltForQuestionAnswering", "vilt")
    ('question-answering', 'visual-question-answering')
    """
    name = architecture or ""
    if name in _DUAL_ENCODERS:
        return COMPARES
    task = next((task for ending, task in _ENDINGS if name.endswith(ending)), None)
    if task == "sequence-classification" and (model_type or "").startswith(_SPEECH_ENCODERS):
        return "audio-classification"
    if task == "question-answering" and model_type in _ANSWER_CLASSES:
        return "visual-question-answering"
    if task == "seq2seq-lm" and model_type in _SPEECH:
        return "speech-seq2seq"
    if task in ("seq2seq-lm", "causal-lm") and vision_config:
        return "image-text-to-text"
    if task is not None:
        return task
    return "other" if "For" in name and not name.endswith("ForPreTraining") else BACKBONE


def is_classifier(task: str) -> bool:
    """Tell whether a task chooses among the labels of the config."""
    return task in _CLASSIFIERS
