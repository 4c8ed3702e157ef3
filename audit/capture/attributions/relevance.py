r"""Layer-wise relevance propagation for transformers, as one backward pass with some factors held fixed.

Relevance of an input is its value times the gradient of a model in which attention weights, the spread
that norms divide by, and the slope y/x of activations are constants (CP-LRP: Ali et al., ICML 2022, arXiv
2202.07304; activations and products as in AttnLRP: Achtibat et al., ICML 2024, arXiv 2402.05602). Of a
product of two activations each factor gets half. What is left is linear in the inputs and in every
constant that is added (biases, position embeddings), so that the score is exactly their sum:

.. math:: f = \sum_i x_i \frac{\partial f}{\partial x_i} + \sum_b b \frac{\partial f}{\partial b}

This is checked for every probe: a model with a step that no rule covers is refused. The other published
rule for attention weights (AttnLRP's, which lets relevance through the softmax) keeps no such sum, so it
could not be checked and is not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from audit.capture.attention.threads import own_thread
from audit.capture.attributions.question import CONVERGED, Question, by_position, differentiable
from audit.capture.inputs.encoded import core_model
from audit.errors import CaptureError

CONSERVED = 1e-3
"""Largest error of the sum in float32, as a part of the sum of sizes; half precision may have CONVERGED."""

_ADDED = ("token", "embed", "position", "newline", "latents")
"""Parts of the names of parameters that a model adds to its inputs, or puts beside them: class tokens,
position embeddings, the ends of rows of patches, learned latents."""


def relevance(question: Question) -> tuple[Tensor, float]:
    """Return |relevance| of each position of one probe: (position,), and the error of the conserved sum.

    One forward and one backward pass.

    Can tell how the logit divides over the positions along the values that attention carries, the
    weights of attention taken as they are. Cannot tell why attention weighs them so (nothing flows
    through queries and keys), nor the share of biases and position embeddings, which is left out.

    Raises
    ------
    CaptureError
        When the relevances and the added constants do not give the score: some step has no rule.
    """
    core = core_model(question.checkpoint.model)
    (item,) = question.batch
    inputs, _, forward, others = differentiable(question)
    with torch.enable_grad(), only_added(core) as added, conserving(core):
        score = forward(inputs, *others)[0]  # checked to be the model's own
        (parts,), total = relevances(score, [inputs], added)
    sizes = by_position(parts, item)
    error = conservation_error(item.probe.id, core, score, total, float(sizes.sum()))
    return sizes, error


def relevances(
    score: Tensor, leaves: Sequence[Tensor], added: Sequence[Tensor]
) -> tuple[list[Tensor], float]:
    """Return the relevance of each number of each leaf, and their sum with that of the constants.

    Parameters
    ----------
    score : Tensor
        A scalar, computed while the rules of :func:`conserving` were in force.
    leaves : sequence of Tensor
        Inputs.
    added : sequence of Tensor
        What :func:`only_added` gave.
    """
    everything = [*leaves, *added]
    slopes: tuple[Tensor | None, ...] = torch.autograd.grad(score, everything, allow_unused=True)
    found = [
        torch.zeros_like(given, dtype=torch.float64)
        if slope is None
        else given.detach().double() * slope.double()
        for given, slope in zip(everything, slopes, strict=True)
    ]
    return found[: len(leaves)], float(sum(part.sum() for part in found))


def conservation_error(probe: str, model: Any, score: Tensor, total: float, sizes: float) -> float:
    """Return by how much relevances and constants miss the score, as a part of the sum of their sizes.

    Raises
    ------
    CaptureError
        When that is more than rounding.
    """
    whole = float(score.detach())
    error = abs(total - whole) / max(sizes, abs(whole), 1e-30)
    allowed = CONSERVED if score.dtype in (torch.float32, torch.float64) else CONVERGED
    if not error <= allowed:
        raise CaptureError(
            f"probe {probe}: relevances miss the target logit by {error:.1%}, allowed {allowed:.1%}, so "
            f"{type(model).__name__} has a step that LRP has no rule for; use input_x_gradient or "
            "integrated_gradients"
        )
    return error


@contextmanager
def only_added(core: Any, *tables: Any) -> Iterator[list[Tensor]]:
    """Let gradients reach, of all parameters, only those that are added; put every flag back.

    `tables` of embeddings are inputs, no constants; by default the model's own.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in core.parameters()]
    inputs = [getattr(table, "weight", None) for table in tables or (_embeddings(core),)]
    added = list[Tensor]()
    for module in core.modules():
        for name, parameter in module.named_parameters(recurse=False):
            embeds = isinstance(module, nn.Embedding)
            is_table = embeds and any(parameter is table for table in inputs)  # also under another name
            if not is_table and (name.endswith("bias") or embeds or any(p in name for p in _ADDED)):
                added.append(parameter)
        for name, buffer in module.named_buffers(recurse=False):  # BART's and Marian's bias of logits
            if name.endswith("logits_bias"):
                added.append(buffer)
                flags.append((buffer, buffer.requires_grad))
    unique = list({id(parameter): parameter for parameter in added}.values())
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        for parameter in unique:
            parameter.requires_grad_(True)
        with _fixed_positions(core, unique):
            yield unique
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


@contextmanager
def _fixed_positions(core: Any, added: list[Tensor]) -> Iterator[None]:
    """Add what modules give that hold fixed numbers alone: M2M100's sinusoids, cut off from any gradient."""

    def collect(_module: nn.Module, _args: Any, output: Any) -> Tensor | None:
        if not isinstance(output, Tensor) or output.requires_grad or not output.is_floating_point():
            return None
        added.append(output.detach().requires_grad_())
        return added[-1]

    with ExitStack() as stack:
        for path, module in core.named_modules():
            named = any(part in path.rpartition(".")[2] for part in _ADDED)
            if named and not any(True for _ in module.parameters()) and any(True for _ in module.buffers()):
                stack.callback(module.register_forward_hook(own_thread(collect)).remove)
        yield


def _embeddings(core: Any) -> Any:
    """Return the table of embeddings, None for models of sound, which may have none."""
    try:
        return core.get_input_embeddings()
    except NotImplementedError:
        return None


# --- the rules --------------------------------------------------------------------------------


@contextmanager
def conserving(model: nn.Module) -> Iterator[None]:
    """Run what this thread computes with the rules of LRP in force; values stay as they are."""
    with ExitStack() as stack:
        for module in model.modules():
            if _is_activation(module):
                stack.callback(module.register_forward_hook(own_thread(_activation_hook)).remove)
        stack.enter_context(_Rules())
        yield


def _is_activation(module: nn.Module) -> bool:
    home = type(module).__module__
    known = home in ("transformers.activations", "torch.nn.modules.activation")
    return known and not any(True for _ in module.parameters()) and not isinstance(module, nn.Softmax)


def _activation_hook(_module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return _as_slope(args[0], output)


def _as_slope(given: Tensor, output: Tensor) -> Tensor:
    """Return `output` as `given` times a constant slope (0 where `given` is 0)."""
    with torch.no_grad():
        slope = torch.where(given == 0, torch.zeros_like(output), output / given)
        rest = output - given * slope
    return given * slope + rest


class _Rules(TorchFunctionMode):
    """Calls the rule of each function of torch that has one, on this thread alone."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(getattr(func, "__name__", ""))
        options = dict(kwargs or {})
        return func(*args, **options) if rule is None else rule(func, list(args), options)


def _varies(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _held(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Hold the result fixed: attention weights, gates, the spread of a norm."""
    return func(*args, **options).detach()


def _attention(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Hold the weights of fused attention fixed, which is to hold queries, keys and masks."""
    args = [a.detach() if i != 2 and isinstance(a, Tensor) else a for i, a in enumerate(args)]
    options = {k: v.detach() if k != "value" and isinstance(v, Tensor) else v for k, v in options.items()}
    return func(*args, **options)


def _multi_head(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Hold the weights of torch's own multi-head attention fixed: all but values and their bias."""
    query, key, value, size, heads, weight, bias, *rest = args
    if bias is not None:  # of queries, keys and values, one after the other
        bias = torch.cat([bias[: 2 * size].detach(), bias[2 * size :]])
    options = {k: v.detach() if k == "attn_mask" and isinstance(v, Tensor) else v for k, v in options.items()}
    return func(query.detach(), key.detach(), value, size, heads, weight, bias, *rest, **options)


def _product(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Give each factor of a product of two activations half."""
    if len(args) < 2 or not (_varies(args[0]) and _varies(args[1])):
        return func(*args, **options)
    one, two = args[:2]
    halves = func(one.detach(), two, *args[2:], **options) + func(one, two.detach(), *args[2:], **options)
    return halves / 2


def _quotient(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Hold what is divided by fixed."""
    if len(args) > 1 and _varies(args[1]) and _varies(args[0]):
        args[1] = args[1].detach()
    return func(*args, **options)


def _slope(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    return _as_slope(args[0], func(*args, **options)) if args else func(*args, **options)


def _embedding(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Let gradients reach the row of padding, too: LXMERT adds it, as its first position's."""
    if func is nn.functional.embedding:
        args[2:3] = [None] * len(args[2:3])
        options.pop("padding_idx", None)
    return func(*args, **options)


def _layer_norm(_func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Hold the standard deviation fixed; the mean is subtracted as it is."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    given = {"weight": None, "bias": None, "eps": 1e-5, **dict(zip(names, args, strict=False)), **options}
    axes = tuple(range(-len(given["normalized_shape"]), 0))
    centred = given["input"] - given["input"].mean(dim=axes, keepdim=True)
    spread = (centred.detach().square().mean(dim=axes, keepdim=True) + given["eps"]).sqrt()
    normed = (centred / spread).contiguous()  # as torch's own is, whatever it takes
    return _scaled(normed, given["weight"], given["bias"])


def _group_norm(_func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    """Hold the standard deviation of each group of channels fixed, over all that follows them."""
    names = ("input", "num_groups", "weight", "bias", "eps")
    given = {"weight": None, "bias": None, "eps": 1e-5, **dict(zip(names, args, strict=False)), **options}
    value = given["input"]
    grouped = value.reshape(len(value), given["num_groups"], -1)
    centred = grouped - grouped.mean(dim=-1, keepdim=True)
    spread = (centred.detach().square().mean(dim=-1, keepdim=True) + given["eps"]).sqrt()
    along = (1, -1, *[1] * (value.dim() - 2))
    weight, bias = (None if given[n] is None else given[n].reshape(along) for n in ("weight", "bias"))
    return _scaled((centred / spread).reshape(value.shape), weight, bias)


def _one_scale(func: Callable[..., Any], args: list[Any], options: dict[str, Any]) -> Any:
    given = args[0] if args else options["input"]
    return _as_slope(given, func(*args, **options))


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    weighted = normed if weight is None else normed * weight
    return weighted if bias is None else weighted + bias


_RULES: dict[str, Callable[..., Any]] = {
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    **dict.fromkeys(("rms_norm", "normalize"), _one_scale),
    "scaled_dot_product_attention": _attention,
    "multi_head_attention_forward": _multi_head,
    **dict.fromkeys(("softmax", "sigmoid", "rsqrt"), _held),
    **dict.fromkeys(("gelu", "silu", "tanh", "elu", "mish", "leaky_relu", "hardswish"), _slope),
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__", "matmul", "__matmul__", "bmm"), _product),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), _quotient),
}
