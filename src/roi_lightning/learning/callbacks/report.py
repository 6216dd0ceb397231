"""The report that a run ends with: what the mask changed, what the models say, and the page that shows it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.errors import UserError
from roi_lightning.evaluation.continuations import (
    Decoding,
    check_room,
    continue_prompts,
    decode,
    encode_prompt,
    read_prompts,
)
from roi_lightning.evaluation.side_by_side import SideBySide
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.callbacks.base import FinishCallback
from roi_lightning.learning.mask_story import mask_story, wanda_masks
from roi_lightning.learning.run_folder import run_folder
from roi_lightning.masks.layer_mask import LayerMask, UnpackedMasks
from roi_lightning.models.config import load_tokenizer, max_positions
from roi_lightning.reports.page import write_report
from roi_lightning.reports.run_files import PAGE, PRIOR, REPORT
from roi_lightning.utils.atomic_io import write_json

_PROMPT_TOKENS: Final = 32
_MAGNITUDE: Final = "magnitude"


class Report(FinishCallback):
    """Writes what the mask changed, and what the models make of some prompts, as a page of the run.

    `report.json` in the run folder has the weights by layer that the learned mask keeps and that its prior, or the
    magnitude mask without one, keeps too; the overlap with the magnitude mask, Wanda's and the prior; corners of
    some layers before and after; and greedy continuations of the dense model, under the prior and under the learned
    mask. `prior.safetensors` is the prior's mask file, `report.html` the page. List it
    last: after what writes the results that the page shows.

    What can't be had is left out, with the reason, under `skipped`: Wanda's mask of a sharded model, held-out text
    of a data module that is none of this package.

    Args:
        prompts: A file with a prompt per line (or `.jsonl` with `{"prompt": …}`), or a list of texts to continue.
        held_out_prompts: So many prompts are the beginnings of held-out windows, beside how the text went on.
        max_new_tokens: Tokens of a continuation at most.
        wanda_windows: Training windows on which Wanda's mask is measured.

    Raises:
        UserError: If a number is too small, or the file can't be read; when a run begins, if a prompt with its
            continuation is longer than the model allows.
    """

    def __init__(
        self,
        # str comes first: jsonargparse reads an existing file given for a list as one item per line
        prompts: str | list[str] | None = None,
        held_out_prompts: int = 3,
        max_new_tokens: int = 48,
        wanda_windows: int = 4,
    ) -> None:
        if held_out_prompts < 0 or max_new_tokens < 1 or wanda_windows < 1:
            raise UserError(
                f"Report.held_out_prompts is {held_out_prompts}, max_new_tokens {max_new_tokens} and wanda_windows "
                f"{wanda_windows}; give at least 0, 1 and 1"
            )
        super().__init__()
        self.prompts = read_prompts(prompts) if isinstance(prompts, str) else list(prompts or ())
        self.held_out_prompts, self.wanda_windows = held_out_prompts, wanda_windows
        self.decoding = Decoding(max_new_tokens=max_new_tokens)
        self._page_due = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        self._prompts(trainer, pl_module)

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        learned = pl_module.final_masks
        # Every rank of a sharded model has to take part; of whole ones the first has all there is.
        takes_part = trainer.is_global_zero or pl_module.device_mesh is not None
        if not takes_part:
            return
        skipped: dict[str, str] = {}
        others = self._others(trainer, pl_module, skipped)
        reference = pl_module.prior_name or _MAGNITUDE
        items = self._continued(trainer, pl_module, skipped)
        if not trainer.is_global_zero:
            return
        story = mask_story(learned, others, reference)
        content = {
            "mask": {"pattern": str(pl_module.pattern), **story, "skipped": skipped},
            "continuations": [asdict(item) for item in items],
            "generation": {
                "max_new_tokens": self.decoding.max_new_tokens,
                "method": self.decoding.method,
            },
        }
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if pl_module.prior_masks:
            pl_module.mask_set(_stored(pl_module, pl_module.prior_masks)).save(folder / PRIOR)
        write_json(folder / REPORT, content)
        self._page_due = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The last moment of a run: its record, which the page shows, has its end by now.
        if self._page_due:
            self._page_due = False
            _write_page(run_folder(trainer))

    def _others(
        self, trainer: Trainer, module: MaskLearningModule, skipped: dict[str, str]
    ) -> dict[str, dict[str, LayerMask]]:
        """The masks that the learned one is compared with, by tensors; a reason for one that can't be had."""
        masks: dict[str, Mapping[str, LayerMask]] = {_MAGNITUDE: module.magnitude_masks}
        data = trainer.datamodule  # type: ignore[attr-defined]
        if module.prior_name == "wanda":
            pass
        elif module.device_mesh is not None:
            skipped["wanda"] = "it goes through the layers one by one, which a sharded model does not allow"
        elif not isinstance(data, CalibrationDataModule):
            skipped["wanda"] = "it reads text from a CalibrationDataModule"
        else:
            try:
                masks["wanda"] = wanda_masks(module, data.windows("train", self.wanda_windows))
            except UserError as error:
                skipped["wanda"] = str(error)
        if module.prior_name is not None:
            masks[module.prior_name] = module.prior_masks
        return {name: _stored(module, found) for name, found in masks.items()}

    def _continued(
        self, trainer: Trainer, module: MaskLearningModule, skipped: dict[str, str]
    ) -> list[SideBySide]:
        items, prompts = self._prompts(trainer, module)
        if not items:
            skipped["continuations"] = "no prompt was given, nor is there held-out text to take one from"
            return []
        tokenizer = _tokenizer(trainer, module)
        for name, context in _candidates(module):
            with context:
                made = continue_prompts(module.model, tokenizer, prompts, self.decoding, f"{name}: tokens")
            for item, one in zip(items, made, strict=True):
                item.answers[name] = one.text
        return items

    def _prompts(
        self, trainer: Trainer, module: MaskLearningModule
    ) -> tuple[list[SideBySide], list[list[int]]]:
        """The prompts as text, and as tokens.

        Raises:
            UserError: If one is too long with its continuation.
        """
        items, encoded = [], []
        for window in self._held_out(trainer.datamodule):  # type: ignore[attr-defined]
            cut = min(_PROMPT_TOKENS, len(window) // 2)
            parts = window[:cut], window[cut : cut + self.decoding.max_new_tokens]
            prompt, expected = (decode(_tokenizer(trainer, module), part) for part in parts)
            items.append(SideBySide(prompt, "held-out text", expected))
            encoded.append(window[:cut])
        items += [SideBySide(text) for text in self.prompts]
        encoded += [encode_prompt(_tokenizer(trainer, module), text) for text in self.prompts]
        for ids in encoded:
            check_room(len(ids), self.decoding.max_new_tokens, max_positions(module.model.config))
        return items, encoded

    def _held_out(self, data: object) -> list[list[int]]:
        """Windows evenly spaced over the held-out text; none of a data module that is no `CalibrationDataModule`."""
        if not isinstance(data, CalibrationDataModule):
            return []
        count = data.val_tokens // data.seq_len
        wanted = min(self.held_out_prompts, count)
        if not wanted:
            return []
        rows: list[list[int]] = data.windows("val", count)[torch.arange(wanted) * count // wanted].tolist()
        return rows


def _write_page(folder: Path) -> None:
    """The page of a run; a run that has all its results does not fail for want of it."""
    page = folder / PAGE
    try:
        write_report([folder], page)
    except Exception as error:  # whatever it is, hours of work are done and written
        rank_zero_warn(
            f"{str(page)!r} could not be written ({type(error).__name__}: {error}); all other results are; "
            f"roi-lightning report {folder} --out {page} tries again"
        )
    else:
        rank_zero_info(f"report: {page}")


def _tokenizer(trainer: Trainer, module: MaskLearningModule) -> PreTrainedTokenizerBase:
    """That of the text, or the model's own."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if isinstance(data, CalibrationDataModule):
        return data.text_tokenizer
    return load_tokenizer(module.source.spec, module.source.revision, module.trust_remote_code)


def _stored(module: MaskLearningModule, masks: Mapping[str, LayerMask]) -> dict[str, LayerMask]:
    """Masks by layer as masks by tensor, in the model's order."""
    return {stored: masks[name] for name, stored in module.stored_weights.items()}


def _candidates(module: MaskLearningModule) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    reference = module.prior_name or _MAGNITUDE
    masks = module.prior_masks or module.magnitude_masks
    yield "dense", module.dense()
    yield reference, module.under_masks(UnpackedMasks(masks))
    yield module.method, module.under_masks()
