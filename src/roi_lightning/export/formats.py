"""Kinds of directory beside exports, which other packages add: each is found by the format that its sidecar names."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.modeling_utils import PreTrainedModel

from roi_lightning.export.verify import VerifyReport, verify_export
from roi_lightning.models.config import DType
from roi_lightning.models.source import ModelSource, format_of
from roi_lightning.utils.entry_points import added, load


@dataclass(frozen=True)
class DirectoryFormat:
    """What is done with a kind of directory; an entry point of the group `roi_lightning.formats` names it.

    Attributes:
        verify: Checks a directory, against its base model if one is passed; see `verify_export`.
        load: Makes the model of a directory that plain transformers can't read, in eval mode on a device.
    """

    verify: Callable[[Path, ModelSource | None], VerifyReport]
    load: Callable[[Path, DType, torch.device], PreTrainedModel] | None = None


def directory_format(name: str) -> DirectoryFormat:
    """The registered format of a name.

    Raises:
        UserError: If it can't be imported.
    """
    form: DirectoryFormat = load(added("formats")[name])
    return form


def verify_directory(directory: Path, base: ModelSource | None = None) -> VerifyReport:
    """Check an exported directory, or one of a registered format; see `verify_export`."""
    name = format_of(directory)
    return (directory_format(name).verify if name else verify_export)(directory, base)
