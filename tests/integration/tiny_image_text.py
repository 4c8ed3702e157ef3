"""Tiny random models that read an image and a text in one sequence, with their real processors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from audit.models.tasks import task_of
from audit.records import Checkpoint, Probe
from tests.integration.tiny_models import byte_tokenizer, checkpoint, word_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 37,
    "max_position_embeddings": 512,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 32,
    "patch_size": 8,
}
SIDE = {"height": 32, "width": 32}


def _tokenizer(*extra: str, **named: str) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer with special tokens, some of them under names as `tokenizer.image_token`."""
    found = byte_tokenizer()
    found.pad_token = "<|end|>"
    found.add_tokens([*extra, *named.values()], special_tokens=True)
    for name, token in named.items():
        setattr(found, name, token)
        setattr(found, f"{name}_id", found.convert_tokens_to_ids(token))
    return found


def _joined(model: Any, processor: Any) -> Checkpoint:
    """Draw the weights anew, the same for whichever test asks first."""
    drawn = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "embed" in name:
                scale = 0.4 if "embed" in name else 0.25
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * scale)
    return replace(checkpoint(model, processor), task="image-text-to-text")


def llava(patch: int = 8) -> Checkpoint:
    """CLIP's patches of the second last layer, one by one through a small network."""
    tokenizer = _tokenizer("<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{**VISION, "patch_size": patch}),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=SIDE)
    processor = transformers.LlavaProcessor(
        images,
        tokenizer,
        patch_size=patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _joined(transformers.LlavaForConditionalGeneration(config), processor)


def llava_next() -> Checkpoint:
    """Tiles of the image and the image as a whole."""
    tokenizer = _tokenizer("<image>")
    pinpoints = [[32, 64], [64, 32], [64, 64]]
    config = transformers.LlavaNextConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=SIDE, image_grid_pinpoints=pinpoints
    )
    processor = transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return _joined(transformers.LlavaNextForConditionalGeneration(config), processor)


def paligemma() -> Checkpoint:
    """SigLIP's patches before the text, both seen in both directions."""
    tokenizer = _tokenizer()
    images = transformers.SiglipImageProcessorPil(size=SIDE)
    images.image_seq_length = 16
    processor = transformers.PaliGemmaProcessor(images, tokenizer)
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.GemmaConfig(**TEXT, head_dim=8, vocab_size=len(tokenizer)),
        image_token_index=processor.image_token_id,
        projection_dim=32,
    )
    return _joined(transformers.PaliGemmaForConditionalGeneration(config), processor)


def gemma3() -> Checkpoint:
    """Means over 2×2 patches."""
    tokenizer = _tokenizer(boi_token="<boi>", image_token="<img>", eoi_token="<eoi>")
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=8, vocab_size=len(tokenizer)),
        image_token_id=tokenizer.image_token_id,
        boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id,
        mm_tokens_per_image=4,
    )
    images = transformers.Gemma3ImageProcessorPil(size=SIDE)
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=4)
    return _joined(transformers.Gemma3ForConditionalGeneration(config), processor)


def idefics3() -> Checkpoint:
    """Pixel shuffle: 2×2 patches side by side in one vector; tiles and the image as a whole."""
    tokenizer = _tokenizer(
        fake_image_token="<fake_token_around_image>",
        image_token="<image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    images = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
    )
    processor = transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
    config = transformers.Idefics3Config(
        vision_config=transformers.Idefics3VisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**TEXT, vocab_size=len(tokenizer), pad_token_id=0),
        image_token_id=processor.image_token_id,
        scale_factor=2,
        pad_token_id=0,
    )
    return _joined(transformers.Idefics3ForConditionalGeneration(config), processor)


class PlainProcessor:
    """In the place of processors that need torchvision: the image's token as often as its patches need it."""

    def __init__(self, images: Any, tokenizer: Any, token: str, count: Callable[[Any], int]) -> None:
        self.image_processor, self.tokenizer, self.image_token, self.count = images, tokenizer, token, count

    def __call__(self, images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        found = self.image_processor(images, return_tensors=return_tensors)
        longer = text.replace(self.image_token, self.image_token * self.count(found))
        tokens = self.tokenizer([longer], return_tensors=return_tensors)
        token = self.tokenizer.convert_tokens_to_ids(self.image_token)
        return {**tokens, **found, "mm_token_type_ids": (tokens["input_ids"] == token).long()}


def qwen2_vl() -> Checkpoint:
    """Patches of any number in one packed row, four of them merged to one token."""
    return _qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2})


def qwen2_5_vl() -> Checkpoint:
    """As Qwen2-VL, some layers of the tower within windows."""
    tower = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 37, "window_size": 32}
    return _qwen("Qwen2_5_VL", {**tower, "fullatt_block_indexes": [1]})


def _qwen(family: str, tower: dict[str, Any]) -> Checkpoint:
    tokenizer = _tokenizer("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    start, end, image, video = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names)
    config = getattr(transformers, f"{family}Config")(
        vision_config={"depth": 3, "num_heads": 4, "patch_size": 8, **tower},
        text_config={**TEXT, "vocab_size": len(tokenizer), "rope_parameters": rope},
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    images = transformers.Qwen2VLImageProcessorPil(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 64 * 64}
    )
    processor = PlainProcessor(
        images, tokenizer, "<|image_pad|>", lambda found: int(found["image_grid_thw"].prod()) // 4
    )
    return _joined(getattr(transformers, f"{family}ForConditionalGeneration")(config), processor)


def qwen3_vl() -> Checkpoint:
    """As Qwen2-VL, with lower layers of the tower added between the first blocks of the decoder."""
    tower = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 37, "num_position_embeddings": 64}
    return _qwen("Qwen3VL", {**tower, "deepstack_visual_indexes": [0, 1]})


def idefics2() -> Checkpoint:
    """A resampler whose learned latents attend to the patches."""
    tokenizer = _tokenizer()
    images = transformers.Idefics2ImageProcessorPil(
        size={"longest_edge": 32, "shortest_edge": 16}, do_image_splitting=False
    )
    processor = transformers.Idefics2Processor(images, tokenizer, image_seq_len=4)
    resampler = {
        "resampler_n_latents": 4,
        "resampler_depth": 2,
        "resampler_n_heads": 4,
        "resampler_head_dim": 8,
    }
    config = transformers.Idefics2Config(
        vision_config=VISION,
        perceiver_config={**resampler, "hidden_size": 32, "num_key_value_heads": 2},
        text_config=transformers.MistralConfig(**TEXT, vocab_size=len(tokenizer)),
        image_token_id=processor.image_token_id,
    )
    return _joined(transformers.Idefics2ForConditionalGeneration(config), processor)


def internvl() -> Checkpoint:
    """Pixel shuffle of tiles."""
    tokenizer = _tokenizer("<IMG_CONTEXT>")
    vision = {**VISION, "image_size": [32, 32], "patch_size": [8, 8]}
    config = transformers.InternVLConfig(
        vision_config=transformers.InternVLVisionConfig(**vision),
        text_config=transformers.Qwen2Config(**TEXT, vocab_size=len(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
    )
    images = transformers.GotOcr2ImageProcessorPil(size=SIDE, crop_to_patches=True, max_patches=3)
    processor = PlainProcessor(
        images, tokenizer, "<IMG_CONTEXT>", lambda found: 4 * len(found["pixel_values"])
    )
    return _joined(transformers.InternVLForConditionalGeneration(config), processor)


def mllama() -> Checkpoint:
    """A decoder some of whose blocks attend to the patches; a tower of two stacks, two layers of it read."""
    tokenizer = _tokenizer("<|image|>", "<|python_tag|>")
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 37,
        "image_size": 32,
        "patch_size": 8,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [1],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        "vision_output_dim": 64,
    }
    text = {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "vocab_size": len(tokenizer)}
    config = transformers.MllamaConfig(
        vision_config=transformers.models.mllama.MllamaVisionConfig(**vision),
        text_config=transformers.models.mllama.MllamaTextConfig(**text, pad_token_id=0),
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )
    images = transformers.MllamaImageProcessorPil(size=SIDE, max_image_tiles=4)
    return _joined(
        transformers.MllamaForConditionalGeneration(config), transformers.MllamaProcessor(images, tokenizer)
    )


def blip() -> Checkpoint:
    """Captions: every block of the decoder attends to the patches."""
    tokenizer = word_tokenizer()
    text = {**TEXT, "vocab_size": len(tokenizer), "encoder_hidden_size": 32, "num_hidden_layers": 2}
    ids = {"bos_token_id": 2, "pad_token_id": 0, "eos_token_id": 3, "sep_token_id": 3}
    config = transformers.BlipConfig(text_config={**text, **ids}, vision_config=VISION, projection_dim=32)
    images = transformers.BlipImageProcessorPil(size=SIDE)
    model = transformers.BlipForConditionalGeneration._from_config(config, attn_implementation="eager")
    return _joined(model, transformers.BlipProcessor(images, tokenizer))


def vilt(**changes: Any) -> Checkpoint:
    """Words and patches in one encoder, no tower before it."""
    tokenizer = word_tokenizer()
    sizes = {**VISION, "vocab_size": len(tokenizer), "max_position_embeddings": 64, **changes}
    config = transformers.ViltConfig(**sizes, num_labels=3)
    images = transformers.ViltImageProcessorPil(size={"shortest_edge": 32}, size_divisor=8)
    model = transformers.ViltForQuestionAnswering._from_config(config, attn_implementation="eager")
    made = _joined(model, transformers.ViltProcessor(images, tokenizer))
    return replace(made, task=task_of(type(model).__name__, config.model_type))


FAMILIES: dict[str, Callable[[], Checkpoint]] = {
    make.__name__: make
    for make in (
        llava,
        llava_next,
        paligemma,
        gemma3,
        idefics3,
        qwen2_vl,
        qwen2_5_vl,
        internvl,
        mllama,
        blip,
        vilt,
    )
}


def question_probes(count: int = 2, size: tuple[int, int] = (40, 56)) -> list[Probe]:
    """Return random images with a question each."""
    draw = np.random.default_rng(0)
    questions = ("the film was good?", "was the acting bad or was it fine")
    return [
        Probe(f"q-{i}", text=questions[i % 2], image=draw.integers(0, 256, (*size, 3), dtype=np.uint8))
        for i in range(count)
    ]
