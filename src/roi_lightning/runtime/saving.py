"""A model that runs packed can't be written as an ordinary checkpoint, and says so."""

from typing import NoReturn

from transformers.modeling_utils import PreTrainedModel

from roi_lightning.errors import UserError

_SAVING = ("save_pretrained", "push_to_hub")


def refuse_saving(lm: PreTrainedModel) -> None:
    """Have a model refuse to be saved, in place: no loader but ours could read what transformers would write."""
    for name in _SAVING:
        setattr(lm, name, _refuse)


def _refuse(*_: object, **__: object) -> NoReturn:
    raise UserError(
        "this model runs packed and can't be saved: keep the directory it came from, or make a packed one of it with "
        "`python -m roi_lightning pack`"
    )
