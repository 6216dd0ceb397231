"""Find a configuration by its bare name: here, in ./configs, or among the ones that come with the package."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]
from typing_extensions import override

from roi_lightning.errors import UserError


def shipped_configs() -> Path:
    """The folder of shipped configurations: inside the wheel, or of the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parents[1] / "configs"


def find_config(name: str) -> Path:
    """The file that a `--config` argument means.

    Args:
        name: A path, or a name under `configs/` with or without `.yaml` (`overlays/linear_anneal`).

    Raises:
        UserError: If there is none; the nearest names are offered.
    """
    for folder in (Path(), Path("configs"), shipped_configs()):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if candidate.expanduser().is_file():
                return candidate.expanduser()
    known = [str(path.relative_to(shipped_configs())) for path in sorted(shipped_configs().rglob("*.yaml"))]
    near = get_close_matches(name, known, n=3, cutoff=0.3) or known
    raise UserError(
        f"no configuration {name!r}, here or among those shipped; did you mean {', '.join(near)}?"
    )


class ConfigByName(ActionConfigFile):
    """`--config` that also takes bare names."""

    @override
    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        # The parser names this file if it finds a mistake in it.
        parser.reading = find_config(values)
        path = str(parser.reading)
        try:
            super().__call__(parser, cfg, path, option_string)  # type: ignore[no-untyped-call]
        except (OSError, RecursionError, UnicodeDecodeError) as error:
            raise UserError(f"configuration {path!r} can't be read: {error}; give a YAML file") from error
        parser.reading = None
