"""The report that a run ends with."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_utils import PreTrainedModel
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule
from roi_lightning.learning.base import MaskLearningModule
from roi_lightning.learning.callbacks.write_masks import FinishCallback, text_facts
from roi_lightning.learning.run_folder import BEFORE, PAGE, REPORT, run_folder
from roi_lightning.masks.layer_mask import LayerMask
from roi_lightning.utils.atomic_io import write_json
from roi_lightning.utils.progress import progress

_PROMPTS: Final = 2
_PROMPT_TOKENS: Final = 32
_NEW_TOKENS: Final = 48


class Report(FinishCallback):
    """Writes `report.html` into the run folder: one page of what the run did.

    The page shows what other callbacks have written, so list this one last: `summary.json`, TensorBoard's log,
    `mask.safetensors`. Beside it `report.json` has the settings of the run and how the dense model, the model under
    the mask before learning and under the learned one go on with the beginnings of two held-out windows;
    `before.safetensors` is the mask before learning: the prior's, or the magnitude mask without a prior.
    """

    @override
    def finish(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, MaskLearningModule)
        # Every rank of a sharded model has to take part; of whole ones the first has all there is.
        if not trainer.is_global_zero and pl_module.device_mesh is None:
            return
        name = pl_module.prior_name or "magnitude"
        before = pl_module.prior_masks or pl_module.magnitude_masks
        continuations = _continuations(pl_module, trainer, name, before)
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        stored = {tensor: before[layer] for layer, tensor in pl_module.stored_weights.items()}
        pl_module.mask_set(stored).save(folder / BEFORE)
        write_json(folder / REPORT, _facts(pl_module, trainer, name) | {"continuations": continuations})
        for logger in trainer.loggers:
            logger.save()  # the page shows its curves
        from roi_lightning.reports.page import write_report

        try:
            write_report(folder, folder / PAGE)
        except Exception as error:  # hours of work are done and written
            rank_zero_warn(
                f"the report could not be written ({type(error).__name__}: {error}); all other results are; "
                f"roi-lightning report {folder} --out {folder / PAGE} tries again"
            )
        else:
            rank_zero_info(f"report: {folder / PAGE}")


def _facts(module: MaskLearningModule, trainer: Trainer, before: str) -> dict[str, Any]:
    device = trainer.strategy.root_device
    return {
        "model": module.source.spec,
        "learner": type(module).__name__,
        "method": module.method,
        "pattern": str(module.pattern),
        "layers": len(module.stored_weights),
        "prior": module.prior_name,
        "before": before,
        "steps": trainer.global_step,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "devices": trainer.world_size,
        "settings": module.run_recipe,
        **text_facts(trainer, trainer.global_step),
    }


def _continuations(
    module: MaskLearningModule, trainer: Trainer, name: str, before: Mapping[str, LayerMask]
) -> list[dict[str, Any]]:
    """Continue held-out texts by the models, beside how they go on; nothing without held-out windows."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    count = data.val_tokens // data.seq_len if isinstance(data, CalibrationDataModule) else 0
    if count == 0:
        return []
    wanted = min(_PROMPTS, count)
    windows = data.windows("val", count)[torch.arange(wanted) * count // wanted]
    cut = min(_PROMPT_TOKENS, data.seq_len // 2)
    texts = {"the text itself": windows[:, cut : cut + _NEW_TOKENS]}
    teacher, _ = module.models()
    models: list[tuple[str, Callable[[], PreTrainedModel]]] = [
        ("dense", lambda: teacher),
        (name, partial(module.harden, before)),
        (module.method, module.harden),
    ]
    for label, model in progress(models, "continuing held-out text"):
        with module.compiler.eager():
            texts[label] = _generate(model(), windows[:, :cut].to(module.device))
    tokenizer = data.text_tokenizer
    spelled = {
        label: tokenizer.batch_decode(ids, skip_special_tokens=True)
        for label, ids in {"prompt": windows[:, :cut], **texts}.items()
    }
    return [{label: rows[i] for label, rows in spelled.items()} for i in range(wanted)]


def _generate(lm: PreTrainedModel, prompts: Tensor) -> Tensor:
    """Add the most probable tokens to prompts of one length; only the new ones, [prompts, tokens]."""
    training = lm.training
    lm.eval()  # one that recomputes activations keeps no cache while it trains
    tokens: Tensor = lm.generate(  # type: ignore[operator]
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        synced_gpus=isinstance(lm, FSDPModule),
    )
    lm.train(training)
    return tokens[:, prompts.shape[1] :]
