"""The hub, with the user's own login."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from roi_lightning.errors import UserError


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
            f"the hub does not let you in ({_reason(error)}); leave out --push, or mend that"
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
            f"{name!r} could not be uploaded ({_reason(error)}); {str(directory)!r} is whole: try again with "
            f"`hf upload {name} {directory}`"
        ) from error
    return str(url)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
