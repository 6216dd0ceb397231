"""Under which licence a pruned model stands: its base's."""

from pathlib import Path
from typing import Final

from huggingface_hub import ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from roi_lightning.errors import UserError

_FIELDS: Final = ("license", "license_name", "license_link")
_FILE: Final = "LICENSE"
_README: Final = "README.md"


def base_card(spec: str, hub_id: str | None, revision: str | None) -> ModelCardData:
    """What the front matter of a base model's README says; empty where there is none to be had.

    Args:
        spec: The model, as when the masks were made; a directory is asked first.
        hub_id: Its name on the hub, if it has one.
        revision: Its commit, if it was read from there.
    """
    readme = _readme(Path(spec).expanduser(), hub_id, revision)
    if readme is None:
        return ModelCardData()
    try:
        data: ModelCardData = ModelCard.load(readme, ignore_metadata_errors=True).data
    except ValueError as error:
        raise UserError(f"the front matter of {str(readme)!r} can't be read ({error}); mend it") from error
    return data


def _readme(directory: Path, hub_id: str | None, revision: str | None) -> Path | None:
    if (directory / "config.json").is_file():
        return directory / _README if (directory / _README).is_file() else None
    if hub_id is None:
        return None
    try:
        return Path(hf_hub_download(hub_id, _README, revision=revision))
    except (OSError, ValueError, HfHubHTTPError):  # no network, or no README: --license is asked for then
        return None


def licence_fields(given: str | None, base: ModelCardData, directory: Path) -> dict[str, str]:
    """The licence for a front matter.

    Args:
        given: By option, an identifier of the hub.
        base: See `base_card`.
        directory: The export, which has the base's LICENSE file if that has one.

    Raises:
        UserError: If none is known.
    """
    link = {"license_link": _FILE} if (directory / _FILE).is_file() else {}
    named = {"license_name": "license-of-the-base-model", **link}
    if given is not None:
        return {"license": given, **(named if given == "other" else {})}
    if base.license:
        return {name: str(base.get(name)) for name in _FIELDS if base.get(name)}
    if link:
        return {"license": "other", **named}
    raise UserError(
        "the base model's licence is not known: it has no LICENSE, and no README that names one; give it with "
        "--license (apache-2.0, mit, llama3, other …)"
    )
