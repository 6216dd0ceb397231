"""Find a configuration by its bare name, here, in ./configs, or among those of the package, and what it extends."""

from pathlib import Path
from typing import Any, Final

import yaml
from jsonargparse import ActionConfigFile, get_loader  # type: ignore[attr-defined]
from typing_extensions import override

from roi_lightning.errors import UserError, did_you_mean, user_path

EXTENDS: Final = "extends"


def shipped_configs() -> Path:
    """The folder of shipped configurations: inside the wheel, or of the source tree."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parents[1] / "configs"


def find_config(name: str, *beside: Path) -> Path:
    """The file that a `--config` argument, or a configuration's `extends`, means.

    Args:
        name: A path, or a name under `configs/` with or without `.yaml` (`overlays/linear_anneal`).
        beside: Folders to look in first.

    Raises:
        UserError: If there is none; near names are offered, or else those of whole configurations.
    """
    path = user_path(name)
    for folder in (*beside, Path(), Path("configs"), shipped_configs()):
        for candidate in (folder / path, folder / f"{path}.yaml"):
            if candidate.is_file():
                return candidate
    raise UserError(f"no configuration {name!r}, here or among those shipped{_offer(name, *beside, Path())}")


def _offer(name: str, *folders: Path) -> str:
    shipped = shipped_configs()
    known = [str(path.relative_to(shipped).with_suffix("")) for path in sorted(shipped.rglob("*.yaml"))]
    known += sorted({path.stem for folder in folders for path in folder.glob("*.yaml")}.difference(known))
    near = did_you_mean(name.removesuffix(".yaml"), known)
    return near or f"; give a file's path, or the name of one in {str(shipped)!r}"


def with_extended(file: Path) -> list[Path]:
    """A configuration's file after those that it extends, the first of all first.

    Raises:
        UserError: If one extends itself or something that is no configuration, or can't be read.
    """
    chain = [file]
    while (name := _extended(chain[0])) is not None:
        try:
            found = find_config(name, chain[0].parent)
        except UserError as error:
            raise UserError(f"{str(chain[0])!r} extends {name!r}: {error}") from error
        if any(found.samefile(known) for known in chain):
            raise UserError(
                f"{str(chain[0])!r} extends {name!r}, which extends it in turn; "
                "name a file that does without, or rename one"
            )
        chain.insert(0, found)
    return chain


def read_config(file: Path) -> dict[str, Any]:
    """What stands in a configuration's file; nothing where that is no mapping, of which the parser says more."""
    try:
        content = get_loader("yaml")(file.read_text(encoding="utf-8"))
    except yaml.YAMLError:
        return {}
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"configuration {str(file)!r} can't be read: {error}; give a YAML file") from error
    return content if isinstance(content, dict) else {}


def _extended(file: Path) -> str | None:
    name = read_config(file).get(EXTENDS)
    if not isinstance(name, str | None):
        raise UserError(f"{str(file)!r} extends {name!r}; give one configuration's name")
    return name


class ConfigByName(ActionConfigFile):
    """`--config` that also takes bare names, and applies what a file extends before the file itself."""

    @override
    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        files = with_extended(find_config(values))
        for file in files:
            # The parser names this file if it finds a mistake in it.
            type(parser).reading = file
            try:
                super().__call__(parser, cfg, str(file), option_string)  # type: ignore[no-untyped-call]
            except RecursionError as error:
                parser.error(f"can't be read: {error}; give a YAML file")
            cfg.pop(EXTENDS, None)
            names = {action.dest for action in parser._actions}
            own = tuple(f"{name}." for name in names if name not in parser.groups or f"{name}.help" in names)
            for key in cfg.keys():  # noqa: SIM118 - of all levels; told here, where the file is known
                if key not in names and not f"{key}.".startswith(own):
                    parser.error(f"Option '{key}' is not accepted")
        # A run is named after the files that were typed.
        del cfg[self.dest][-len(files) : -1]
        type(parser).reading = None
