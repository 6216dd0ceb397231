"""The hub: what it knows of the base model's licence, and the upload with the user's own login."""

from pathlib import Path
from typing import Final

from huggingface_hub import HfApi, ModelCard, ModelCardData, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from roi_lightning.errors import UserError

_FIELDS: Final = ("license", "license_name", "license_link")
_FILE: Final = "LICENSE"
_README: Final = "README.md"


def check_name(name: str) -> None:
    """Refuse what is no name of a repository.

    Raises:
        UserError: Naming it.
    """
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UserError(f"--name {name!r} is no name of a repository: {error}") from error
    if name.count("/") != 1:
        raise UserError(f"--name {name!r} lacks its owner; give owner/name")


def check_login() -> str:
    """The user's name on the hub.

    Raises:
        UserError: If nobody is logged in, or the hub can't be reached.
    """
    try:
        name: str = HfApi().whoami()["name"]
    except LocalTokenNotFoundError as error:
        raise UserError("nobody is logged in to the hub; run `hf auth login`, or leave out --push") from error
    except Exception as error:
        raise UserError(
            f"the hub does not let you in ({_reason(error)}); leave out --push, or log in again"
        ) from error
    return name


def push(directory: Path, name: str, private: bool) -> str:
    """Upload a directory as a model repository, which is made if it does not exist.

    Args:
        directory: Everything in it is uploaded.
        name: `owner/name`.
        private: Whether a new repository is for its owner alone.

    Returns:
        Where it can be seen.

    Raises:
        UserError: If the hub refuses; the directory stays.
    """
    api = HfApi()
    try:
        url = api.create_repo(name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=directory, commit_message="Upload with roi_lightning")
    except Exception as error:
        raise UserError(
            f"{name!r} could not be uploaded ({_reason(error)}); {str(directory)!r} is complete: try again with "
            f"`hf upload {name} {directory}`"
        ) from error
    return str(url)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


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
        raise UserError(f"the front matter of {str(readme)!r} can't be read ({error}); correct it") from error
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
