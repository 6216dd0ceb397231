"""Prune a whole model into a mask set, its updated tensors in files."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.data import CalibrationDataModule, Corpus
from roi_lightning.errors import UserError
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.masks.layer_patterns import LayerPatterns
from roi_lightning.masks.mask_set import MaskSet
from roi_lightning.models.base_tensors import BaseTensors
from roi_lightning.models.config import NamedTokenizer
from roi_lightning.models.fingerprint import base_model
from roi_lightning.models.layers import ChosenLayers, stored_weights
from roi_lightning.models.stored_tensors import tensor_sha256
from roi_lightning.oneshot.block_runner import on_disk
from roi_lightning.oneshot.methods import OneShotMethod
from roi_lightning.oneshot.pipeline import Calibration, prune_layers
from roi_lightning.utils.atomic_io import temporary_name


def calibration_text(
    tokenizer: NamedTokenizer, corpora: Sequence[Corpus | str] | str, seq_len: int, seed: int, **options: Any
) -> CalibrationDataModule:
    """The text of some corpora, all of it for calibration and none held out.

    Args:
        tokenizer: The model's name, the directory of its tokenizer, or that itself.
        corpora: Text, see `CalibrationDataModule`.
        seq_len: Tokens of a window.
        seed: Of the choice of windows.
        options: Of `CalibrationDataModule`: `tokenizer_revision`, `trust_remote_code`.

    Raises:
        UserError: For a corpus that makes no sense.
    """
    sources = corpora if isinstance(corpora, str) else list(corpora)
    return CalibrationDataModule(
        tokenizer, corpora=sources, val_corpora=sources, seq_len=seq_len, seed=seed, **options
    )


def calibration_windows(data: CalibrationDataModule, count: int) -> Tensor:
    """Windows of calibration text.

    Args:
        data: The text.
        count: How many windows.

    Returns:
        Token ids, int64 [count, seq_len].

    Raises:
        UserError: If the text holds fewer windows, or only answers count.
    """
    answers = [corpus.source for corpus in data.corpora if corpus.loss_on == "answers"]
    if answers:
        raise UserError(
            f"corpus {answers[0]!r} has loss_on: answers, and pruning without training has no loss: it measures "
            "the inputs of all tokens; leave loss_on out"
        )
    available = data.train_tokens // data.seq_len
    if 0 < available < count:  # streamed text has no length
        raise UserError(
            f"the calibration text holds {available} windows of {data.seq_len} tokens, {count} are asked for; "
            "give more text, or lower --windows or --seq_len"
        )
    return data.windows("train", count)


def prune_model(
    base: BaseTensors,
    lm: PreTrainedModel,
    chosen: ChosenLayers,
    method: OneShotMethod,
    calibration: Calibration | None,
    keep: Callable[[str, Tensor], None],
) -> MaskSet:
    """Prune a model's layers; the model itself stays as it is.

    Args:
        base: Its tensors as stored.
        lm: The model.
        chosen: Its layers to prune, and their patterns.
        method: How.
        calibration: On what; None for methods that read no text.
        keep: Receives every masked tensor whose kept values changed, by its name on disk.

    Returns:
        The masks, by names on disk, with the hashes of the base's tensors and of the updated ones.

    Raises:
        UserError: If the model's layout or its activations do not allow it, or the disk refuses.
    """
    layers, pattern = chosen.pruned, chosen.pattern
    stored = stored_weights(base.source, lm, layers)
    masks: dict[str, LayerMask] = {}
    hashes: dict[str, str] = {}
    dtypes = {layer: base[name].dtype for layer, name in stored.items()}
    for layer, result in prune_layers(lm, layers, method, pattern, calibration, dtypes):
        name = stored[layer]
        transposed = layers[layer].transposed
        masks[name] = LayerMask.from_rows(result.mask, transposed)
        if result.weight is not None:
            if result.weight.dtype != dtypes[layer]:
                raise UserError(
                    f"{name} is stored as {dtypes[layer]} and its update was made in {result.weight.dtype}, "
                    "which would not fit; run the model in its stored dtype (no --dtype), or take the mask alone "
                    "(--mask_only)"
                )
            updated = result.weight.T.contiguous() if transposed else result.weight
            keep(name, updated)
            hashes[name] = tensor_sha256(updated)
    ordered = {name: masks[name] for name in stored.values()}
    kept_dense = stored_weights(base.source, lm, chosen.dense)
    dense = {name: chosen.dense[layer].numel for layer, name in kept_dense.items()}
    if isinstance(pattern, LayerPatterns):
        pattern = pattern.renamed(stored | kept_dense)
    return MaskSet(pattern, ordered, base_model(base, ordered), hashes, dense)


class TensorStore(dict[str, Tensor]):
    """Tensors on the disk by name, so that a whole model's worth of them needs no memory.

    Args:
        folder: Where they are, in files that go with them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    @classmethod
    @contextmanager
    def beside(cls, path: Path) -> Iterator[Self]:
        """A store in a hidden folder next to `path`, on the same disk, that is gone when the block ends."""
        parent = path.absolute().parent
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix=temporary_name(path)) as name:
            yield cls(Path(name))

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor.

        Raises:
            UserError: If the disk refuses.
        """
        self[name] = on_disk(tuple(tensor.shape), tensor.dtype, self._folder).copy_(tensor)
