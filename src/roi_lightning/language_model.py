"""Load a causal language model, freeze it, and name the linear layers that a mask may prune."""

import io
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from fnmatch import fnmatchcase
from typing import Any, Final, Literal

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.errors import UserError
from roi_lightning.pattern import NMPattern
from roi_lightning.sources import ModelSource, resolve_model

DType = Literal["auto", "float32", "bfloat16", "float16"]
_DROPOUTS: Final = ("dropout", "pdrop", "layerdrop")


def load_config(source: ModelSource, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read a model's configuration; no weight is touched.

    Raises:
        UserError: If transformers can't read it.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            **source.pretrained, trust_remote_code=trust_remote_code
        )
        return config
    except Exception as error:
        raise _unreadable(source, error) from error


def load_tokenizer(
    spec: str, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """The tokenizer that belongs to a model.

    Raises:
        UserError: If the model can't be found or has no tokenizer.
    """
    source = resolve_model(spec, revision)
    try:
        return AutoTokenizer.from_pretrained(**source.pretrained, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _unreadable(source, error) from error


def load_language_model(
    source: ModelSource,
    dtype: DType = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a model onto the CPU, frozen, in train mode, every dropout at zero.

    Train mode matters: transformers skips activation checkpointing in eval mode, and Lightning leaves the
    mode as it finds it. With dropout at zero the two modes compute the same.

    Args:
        source: Where the model lies.
        dtype: Of the frozen weights; `auto` takes the stored one (bfloat16 for a GGUF file).
        trust_remote_code: Let the repository's own Python code run.
        attn_implementation: Passed on to transformers (`sdpa`, `eager`, `flash_attention_2`).

    Raises:
        UserError: If it can't be read.
    """
    is_gguf = source.kind == "gguf"
    options: dict[str, Any] = {} if is_gguf else {"use_safetensors": True}
    if attn_implementation:
        options["attn_implementation"] = attn_implementation
    try:
        with _bars_only_on_terminals():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source.pretrained,
                output_loading_info=True,
                dtype="float32" if is_gguf else dtype,
                trust_remote_code=trust_remote_code,
                **options,
            )
    except Exception as error:
        raise _unreadable(source, error) from error
    lm: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    if report["missing_keys"]:
        # transformers fills what a checkpoint lacks with random numbers and only mentions it.
        names = sorted(report["missing_keys"])
        raise UserError(f"model {source.spec!r} lacks {len(names)} tensors, {names[0]!r} first; fetch it again")
    if is_gguf:
        _forget_gguf(lm)
        _cast(lm, torch.bfloat16 if dtype == "auto" else getattr(torch, dtype))
    return freeze(lm)


@contextmanager
def _bars_only_on_terminals() -> Iterator[None]:
    # transformers draws its bars into log files too, one long line of them.
    if sys.stderr.isatty():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


def meta_language_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model's structure on the meta device: shapes without memory."""
    with torch.device("meta"):
        lm: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return lm


def freeze(lm: PreTrainedModel) -> PreTrainedModel:
    """Stop gradients to every weight, set train mode, and turn every dropout off, in place."""
    lm.requires_grad_(False)
    lm.config.use_cache = False
    _zero_dropouts(lm.config)
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        _zero_dropouts(module)
    lm.train()
    return lm


def _zero_dropouts(owner: object) -> None:
    for name, value in list(vars(owner).items()):
        if isinstance(value, float) and any(part in name for part in _DROPOUTS):
            setattr(owner, name, 0.0)


def _forget_gguf(lm: PreTrainedModel) -> None:
    # The weights are plain tensors now, but transformers would refuse to save them as "quantized".
    lm.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(lm.config, "quantization_config"):
        del lm.config.quantization_config


def _cast(lm: PreTrainedModel, dtype: torch.dtype) -> None:
    # Parameters only: rotary frequencies are buffers that transformers keeps in fp32 whatever the dtype.
    for parameter in lm.parameters():
        parameter.data = parameter.data.to(dtype)


def _unreadable(source: ModelSource, error: Exception) -> UserError:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return UserError(f"model {source.spec!r} ({source.kind}) can't be read: {reason}")


def prunable_layers(
    lm: PreTrainedModel,
    targets: Sequence[str] = ("*",),
    ignore: Sequence[str] = (),
) -> dict[str, nn.Linear | Conv1D]:
    """Every linear layer inside the decoder blocks, by name, in the model's order.

    Embeddings and `lm_head` lie outside the blocks and are never among them.

    Args:
        lm: Any causal language model whose blocks are a `ModuleList` of the configured length.
        targets: Glob patterns of layers to prune, matched against the whole dotted name or its end
            (`q_proj`, `mlp.*`, `model.layers.0.*`).
        ignore: Patterns of layers to leave dense.

    Raises:
        UserError: If no blocks are found, a pattern matches nothing, or no layer remains.
    """
    candidates = _block_linears(lm)
    for label, patterns in (("targets", targets), ("ignore", ignore)):
        for pattern in patterns:
            if not any(_matches(name, pattern) for name in candidates):
                raise UserError(
                    f"model.{label}: {pattern!r} matches none of the {len(candidates)} linear layers; "
                    f"they are named like {next(iter(candidates))!r}"
                )
    chosen = {
        name: layer
        for name, layer in candidates.items()
        if _any_match(name, targets) and not _any_match(name, ignore)
    }
    if not chosen:
        raise UserError(f"model.ignore {list(ignore)} leaves no layer to prune; remove a pattern")
    return chosen


def _block_linears(lm: PreTrainedModel) -> dict[str, nn.Linear | Conv1D]:
    blocks = decoder_blocks(lm)
    found = {
        name: module
        for name, module in lm.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and name.startswith(f"{blocks}.")
    }
    if not found:
        raise UserError(f"{type(lm).__name__} has no linear layers inside {blocks!r}; it can't be pruned")
    return found


def decoder_blocks(lm: PreTrainedModel) -> str:
    """The dotted name of the list of decoder blocks.

    Raises:
        UserError: If the model has no list as long as its configuration says.
    """
    depth = lm.config.get_text_config().num_hidden_layers
    for name, module in lm.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return str(name)
    raise UserError(
        f"{type(lm).__name__} has no list of {depth} decoder blocks; this layout is not supported"
    )


def _any_match(name: str, patterns: Iterable[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def check_pattern(layers: dict[str, nn.Linear | Conv1D], pattern: NMPattern) -> None:
    """Refuse a pattern that does not divide some layer's input.

    Raises:
        UserError: Naming the first such layer.
    """
    for name, layer in layers.items():
        pattern.check(layer.weight.shape[input_dim(layer)], name)


def input_dim(layer: nn.Module) -> int:
    """The input dimension of the layer's weight: 0 for GPT-2's `Conv1D` ([in, out]), else 1 ([out, in])."""
    return 0 if isinstance(layer, Conv1D) else 1


def stored_names(lm: PreTrainedModel, names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
    """Map parameter names of the loaded model to the names of the same tensors on disk.

    Some checkpoints (GPT-2's) leave out the prefix of the inner model, others keep it.

    Raises:
        UserError: If a parameter is on disk under no known name.
    """
    known, prefix = set(stored), f"{lm.base_model_prefix}."
    mapping = {}
    for name in names:
        options = (name, name.removeprefix(prefix), prefix + name)
        match = next((option for option in options if option in known), None)
        if match is None:
            raise UserError(f"parameter {name!r} is not among the model's {len(known)} stored tensors")
        mapping[name] = match
    return mapping
