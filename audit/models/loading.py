"""Bring a checkpoint's files to life with transformers and PEFT, and check what came out."""

from __future__ import annotations

import pickle
import re
import threading
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from audit.errors import CheckpointError
from audit.models import digests as files
from audit.models.tasks import BACKBONE, is_classifier, task_of

LOCK = threading.RLock()
"""transformers swaps global initialisers and log levels while it loads: one load at a time."""

_INERT = re.compile(r"(^|\.)(masked_spec_embed|mask_token|position_ids)$")
"""Weights that play no part outside training."""

_POOLER = re.compile(r"(^|\.)pooler\.")
_AUTO_OF_ADAPTER = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
}
_SHORT = 160


@dataclass(frozen=True)
class Request:
    """What to load, and how; see :func:`audit.models.load_checkpoint`."""

    ref: str
    directory: Path
    architecture: str | None
    adapter: Path | None = None
    device: str = "auto"
    dtype: Any = None
    trust_remote_code: bool = False
    attention_implementation: str | None = None

    def error(self, problem: str) -> CheckpointError:
        """Return the error that names this checkpoint and its problem."""
        return CheckpointError(f"checkpoint {self.ref}: {problem}")


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, and what its head is good for."""

    model: Any
    task: str
    has_head: bool
    base_has_head: bool = True


def load(request: Request) -> Loaded:
    """Load the model of a request, its adapter included, onto its device.

    Raises
    ------
    CheckpointError
    """
    device = _device(request)
    with LOCK, quietly(), torch.random.fork_rng(devices=[]):
        config = _config(request)
        name = _class_name(request, config)
        model, missing = _base(request, config, name)
        covered = _covered(request.adapter, request.ref)
        loaded = _settle_head(request, model, name, missing, covered)
        if request.adapter is not None:
            loaded = Loaded(
                _with_adapter(request, loaded.model), loaded.task, loaded.has_head, loaded.base_has_head
            )
    _check_finite(request, loaded.model)
    with explained(request, f"it does not fit on {device}", "choose another device or dtype"):
        for parameter in loaded.model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
            parameter.data = _own(parameter.data, device)
        loaded.model.to(device).eval()
    return loaded


def _own(tensor: Any, device: torch.device) -> Any:
    """Return a copy in aligned memory: tensors mapped from a file round differently by their offset in it."""
    return tensor.to(device) if device.type != tensor.device.type else tensor.clone()


# --- the model --------------------------------------------------------------------------------


def _config(request: Request) -> Any:
    with explained(request, "its config.json cannot be used", "mend the file, or upgrade transformers"):
        _refuse_remote_code(request)
        return transformers.AutoConfig.from_pretrained(
            request.directory, trust_remote_code=request.trust_remote_code, local_files_only=True
        )


def _refuse_remote_code(request: Request) -> None:
    config = files.read_json(request.directory / "config.json", request.ref)
    native = request.architecture is None or hasattr(transformers, request.architecture)
    if "auto_map" in config and not native and not request.trust_remote_code:
        raise request.error(
            f"{request.architecture} is Python code that the checkpoint brings along; "
            "read it, then allow it with trust_remote_code"
        )


def _class_name(request: Request, config: Any) -> str | None:
    """Return the class to load: the config's, or the one whose head the adapter brings along."""
    name = request.architecture
    if request.adapter is None:
        return name
    adapter = files.read_json(request.adapter / files.ADAPTER_CONFIG, request.ref)
    auto = _AUTO_OF_ADAPTER.get(str(adapter.get("task_type")))
    if auto is None or task_of(name, config.model_type) == task_of(auto.removeprefix("AutoModel")):
        return name
    mapping = getattr(transformers, auto)._model_mapping
    if type(config) not in mapping:
        return name
    size = files.adapter_head_size(request.adapter)
    if size is not None and is_classifier(task_of(auto.removeprefix("AutoModel"))):
        config.num_labels = size
    return str(mapping[type(config)].__name__)


def _model_class(request: Request, config: Any, name: str | None) -> Any:
    """Return the class called `name`; the backbone's for pre-training heads and for no name."""
    if name is not None and not name.endswith("ForPreTraining"):
        if hasattr(transformers, name):
            return getattr(transformers, name)
        remote = getattr(config, "auto_map", {}) if request.trust_remote_code else {}
        reference = next((ref for ref in remote.values() if str(ref).endswith(f".{name}")), None)
        if reference is not None:
            from transformers.dynamic_module_utils import get_class_from_dynamic_module

            return get_class_from_dynamic_module(reference, request.directory)
        raise request.error(
            f"transformers {transformers.__version__} has no class {name}; upgrade "
            "transformers, or allow the checkpoint's own code with trust_remote_code"
        )
    return transformers.AutoModel


def _base(request: Request, config: Any, name: str | None) -> tuple[Any, set[str]]:
    """Return the model with the weights of the checkpoint, and the names it has no weights for."""
    options: dict[str, Any] = {"config": config, "local_files_only": True, "weights_only": True}
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "dtype": _dtype(request)}
    if request.attention_implementation is not None:
        options["attn_implementation"] = request.attention_implementation
    with explained(request, "its weights cannot be loaded", "save it again with save_pretrained"):
        model, report = _model_class(request, config, name).from_pretrained(request.directory, **options)
    for key, saved, expected in sorted(report["mismatched_keys"]):
        raise request.error(
            f"tensor {key} is {_shape(saved)}, its config expects {_shape(expected)}; "
            "config.json and weights belong to different models"
        )
    _check_unexpected(request, model, report["unexpected_keys"])
    return model, {key for key in report["missing_keys"] if not _INERT.search(key)}


def _check_unexpected(request: Request, model: Any, unexpected: Collection[str]) -> None:
    """Refuse weights of layers that the config does not have; a left-over head is no harm."""

    def pattern(key: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", key)

    own = {pattern(key) for key in model.state_dict() if re.search(r"\.\d+\.", key)}
    for key in sorted(unexpected):
        if pattern(key) in own:
            raise request.error(
                f"weights have {key}, a layer that config.json leaves out; "
                "config.json and weights belong to different models"
            )


def _settle_head(
    request: Request, model: Any, name: str | None, missing: set[str], covered: Collection[str]
) -> Loaded:
    """Keep the head when its weights are there (or in the adapter), else go on with the backbone."""
    task = task_of(name, model.config.model_type, vision_config=hasattr(model.config, "vision_config"))
    base = model.base_model
    if task == BACKBONE:
        poolers = {key for key in missing if _POOLER.search(key)}
        if poolers and getattr(model, "pooler", None) is not None:
            model.pooler = None  # it would be random
        _check_backbone(request, missing - poolers)
        return Loaded(model, task, has_head=False, base_has_head=False)
    prefix = f"{model.base_model_prefix}."
    head = {key for key in missing if base is not model and not key.startswith(prefix)}
    _check_backbone(request, missing - head - set(covered))
    if not head:
        return Loaded(model, task, has_head=True)
    if head <= set(covered):
        return Loaded(model, task, has_head=True, base_has_head=False)
    return Loaded(base, BACKBONE, has_head=False, base_has_head=False)


def _check_backbone(request: Request, missing: Collection[str]) -> None:
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise request.error(
            f"no weights for {min(missing)}{more}; save the whole model again, or mend "
            "'architectures' in config.json"
        )


def _check_finite(request: Request, model: Any) -> None:
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.element_size() > 1 and tensor.numel():
            low, high = torch.aminmax(tensor)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                bad = int((~torch.isfinite(tensor)).sum())
                raise request.error(
                    f"tensor {name} holds {bad} NaN or infinite weights of "
                    f"{tensor.numel()}; use an earlier checkpoint"
                )


# --- the adapter ------------------------------------------------------------------------------


def _covered(adapter: Path | None, ref: str) -> set[str]:
    """Return the names of whole modules that an adapter brings along, such as a classifier."""
    if adapter is None:
        return set()
    (path,) = files.adapter_weights(adapter)
    if path.suffix == ".safetensors":
        names: Collection[str] = files.tensor_shapes(path, ref)
    else:
        names = torch.load(path, map_location="meta", weights_only=True)
    return {name.removeprefix("base_model.model.") for name in names if "lora_" not in name}


def _with_adapter(request: Request, model: Any) -> Any:
    """Return the model with the adapter's layers inside; its class stays what it was."""
    from peft import PeftConfig, PeftModel

    what = f"its adapter {request.adapter} cannot be put on it"
    with explained(request, what, "give the base that it was trained on"):
        config = PeftConfig.from_pretrained(str(request.adapter))
        if config.is_prompt_learning or config.is_adaption_prompt:
            raise request.error(
                f"adapter {request.adapter} is {config.peft_type.value}, which adds positions "
                "to the input; only adapters on weights (LoRA and its kin) can be audited"
            )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped = PeftModel.from_pretrained(model, str(request.adapter), is_trainable=False)
        for warning in caught:
            if "missing adapter keys" in str(warning.message):
                raise ValueError("it has no weights for some of its layers")
    return wrapped.get_base_model()


@contextmanager
def adapter_off(model: Any, adapter: str) -> Iterator[None]:
    """Switch every adapter layer of a model off, and on again on leaving.

    Raises
    ------
    CheckpointError
        When the adapter trained biases of the base, which stay changed when it is off.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    trained = {getattr(c, "bias", "none") for c in getattr(model, "peft_config", {}).values()}
    if trained - {"none", None}:
        raise CheckpointError(
            f"adapter {adapter}: it trained biases of its base, which stay when it is switched off; "
            "load the base by itself"
        )
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    layers: list[Any] = [module for module in model.modules() if isinstance(module, kinds)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


# --- settings and messages --------------------------------------------------------------------


def _device(request: Request) -> torch.device:
    if request.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(request.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise request.error(
            f"device {request.device!r} is not available here; use auto, cpu or cuda"
        ) from None
    return device


def _dtype(request: Request) -> Any:
    dtype = request.dtype
    if dtype is None:
        return torch.float32
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, None)
    if dtype != "auto" and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise request.error(f"dtype {request.dtype!r} is unknown; use auto, float32, bfloat16 or float16")
    return dtype


def _shape(size: Collection[int]) -> str:
    return "×".join(str(n) for n in size) or "a number"


@contextmanager
def explained(request: Request, problem: str, remedy: str) -> Iterator[None]:
    """Turn whatever the libraries raise into one line that names the checkpoint and the remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except pickle.UnpicklingError:
        raise request.error(
            "its pickled weights hold more than tensors and are refused, since loading "
            "them would run code; save the model as safetensors"
        ) from None
    except Exception as error:  # transformers, safetensors and PEFT raise a dozen kinds
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        short = first if len(first) <= _SHORT else f"{first[:_SHORT]}…"
        raise CheckpointError(f"{problem} ({short}); {remedy}") from None


@contextmanager
def quietly() -> Iterator[None]:
    """Keep transformers' progress bars and reports off the terminal, and put its settings back."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
