"""Configurations and overrides, mutated and made up: parsed and instantiated as `fit` and `plan` do; nothing runs."""

import contextlib
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from roi_lightning.cli.config_files import shipped_configs
from roi_lightning.cli.lightning import build
from roi_lightning.cli.plan import make_plan

# Planning simulates a step; this fraction of the cases does.
_PLANNED = 0.1
_VALUES = (
    *("", "null", "true", "no", "0", "-1", "1", "2", "7", "4294967296", "1" + "0" * 30, "0.5", "-0.0"),
    *("1e-3", ".nan", ".inf", "-.inf", "1_000", "0x10", "2:4", "'2:4'", "5:4", "124", "1:2:3", "2024-01-01"),
    *("~", "[]", "{}", "[1, 2]", "[[[]]]", "{a: 1}", "{class_path: Linear}", "!!set {a}"),
    *("{class_path: nowhere.Thing}", "GumbelTopK", "Categorical", "StraightThrough", "Linear", "Constant"),
    *("magnitude", "smollm2-135m", "cpu", "torch.optim.SGD", "torch.optim.AdamW", "torch.nn.Linear"),
    *("bf16-true", "16-mixed", "ddp", "python-docs", "../../..", "/proc/self/mem", "\x00", "é∞", "x" * 3000),
    *("[" * 500, "{a: " * 100, "'", '"', "- -", "? a", "|"),
)
_PIECES = (b"", b":", b"\n", b"  ", b"- ", b"{", b"]", b"\t", b"\xff", b"\x00", b"#")


class ConfigCases:
    """Cases around the shipped configurations, on a tiny model.

    Args:
        folder: To work in; the model is in its `model`.
        model: The model's folder.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        files = sorted(shipped_configs().rglob("*.yaml"))
        self.texts = {file.relative_to(shipped_configs()).as_posix(): file.read_text() for file in files}
        self.keys = sorted({key for text in self.texts.values() for key in _dotted(yaml.safe_load(text))})

    def __call__(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """Draw a case."""
        kind = rng.choice(("mutated text", "mutated tree", "made-up tree", "overrides", "overlays"))
        args = ["-c", "quickstart.yaml"]
        if kind == "overlays":
            for name in rng.sample(list(self.texts), rng.randrange(1, 5)):
                args += ["-c", name]
        elif kind != "overrides":
            file = self.folder / "mutated.yaml"
            file.write_bytes(getattr(self, f"_{kind.replace(' ', '_').replace('-', '_')}")(rng))
            args += ["-c", str(file)]
        args += ["--model.lm", str(self.model), "--trainer.accelerator", "cpu", "--data.seq_len", "16"]
        if kind == "overrides":
            for _ in range(rng.choice((1, 1, 2, 4))):
                args += [f"--{rng.choice(self.keys)}={rng.choice(_VALUES)}"]
        planned = rng.random() < _PLANNED
        return f"{kind}, {'plan' if planned else 'fit'}", partial(_plan if planned else _instantiate, args)

    def _mutated_text(self, rng: random.Random) -> bytes:
        data = bytearray(rng.choice(list(self.texts.values())).encode())
        for _ in range(rng.choice((1, 2, 5, 20))):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(4)] = rng.choice(_PIECES)
        return bytes(data)

    def _mutated_tree(self, rng: random.Random) -> bytes:
        tree = yaml.safe_load(rng.choice(list(self.texts.values())))
        for _ in range(rng.choice((1, 1, 3))):
            if not tree:
                break
            parent, key = _somewhere(rng, tree)
            if rng.random() < 0.2:
                del parent[key]
            elif isinstance(parent, dict) and rng.random() < 0.2:
                parent[f"{key}{rng.choice('xs_')}"] = parent.pop(key)
            else:
                parent[key] = _value(rng)
        return str(yaml.safe_dump(tree)).encode()

    def _made_up_tree(self, rng: random.Random) -> bytes:
        tree: dict[str, object] = {}
        for _ in range(rng.randrange(1, 6)):
            *path, last = rng.choice(self.keys).split(".")
            inner: Any = tree
            for part in path:
                inner = inner.setdefault(part, {})
                if not isinstance(inner, dict):
                    break
            else:
                inner[last] = _value(rng)
        return str(yaml.safe_dump(tree)).encode()


def _instantiate(args: list[str]) -> None:
    cli = build(args)
    cli.model.preflight(cli.trainer)


def _plan(args: list[str]) -> None:
    make_plan(args)


def _dotted(tree: object, prefix: str = "") -> list[str]:
    if not isinstance(tree, dict):
        return [prefix]
    inner = [key for name, value in tree.items() for key in _dotted(value, f"{prefix}.{name}".lstrip("."))]
    return [*inner, prefix] if prefix else inner


def _somewhere(rng: random.Random, tree: Any) -> tuple[Any, Any]:
    """A container within a tree, and a key or index of it."""
    while True:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        inner = tree[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            return tree, key
        tree = inner


def _value(rng: random.Random) -> object:
    text = rng.choice(_VALUES)
    with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
        return yaml.safe_load(text)
    return text
