"""Find a configuration by its bare name: here, in ./configs, or among the ones that come with the package."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import yaml
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]
from typing_extensions import override

from roi_lightning.errors import UserError

_DEEPEST: Final = 40
_LARGEST: Final = 10_000


def shipped_configs() -> Path:
    """The folder of shipped configurations: inside the wheel, or of the source tree."""
    package = Path(__file__).resolve().parent
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


def check_size(path: Path) -> None:
    """Refuse a file that would be endless once read: nested too deeply, or its aliases repeated too often.

    Only the parser's events are looked at, one by one; whatever else is wrong is the parser's to say.

    Args:
        path: A YAML file.

    Raises:
        UserError: Naming the file, also if it is no text.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"configuration {str(path)!r} can't be read: {error}; give a YAML file") from error
    try:
        reason = _excess(text)
    except yaml.YAMLError:
        return
    if reason:
        raise UserError(f"configuration {str(path)!r} {reason}; give a plainer file")


def _excess(text: str) -> str | None:
    sizes: dict[str, int] = {}  # nodes of every anchor that is complete
    open_nodes: list[tuple[str | None, int]] = []  # anchors of the collections around, and nodes before them
    nodes = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in open_nodes):
                return f"holds {event.anchor!r} within itself"
            nodes += sizes.get(event.anchor, 1)
        elif isinstance(event, yaml.ScalarEvent):
            nodes += 1
            sizes[event.anchor or ""] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_nodes.append((event.anchor, nodes))
            nodes += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_nodes.pop()
            sizes[anchor or ""] = nodes - before
        if len(open_nodes) > _DEEPEST:
            return f"is nested more than {_DEEPEST} deep"
        if nodes > _LARGEST:
            return f"has more than {_LARGEST:,} values"
    return None


class ConfigByName(ActionConfigFile):
    """`--config` that also takes bare names."""

    @override
    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        # The parser names this file if it finds a mistake in it.
        parser.reading = find_config(values)
        check_size(parser.reading)
        super().__call__(parser, cfg, str(parser.reading), option_string)  # type: ignore[no-untyped-call]
        parser.reading = None
