"""Rules about the source text: who may import whom, and what may not be written at all."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import roi_lightning

ROOT = Path(roi_lightning.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Every file imports only from those above it; the files of one package may import each other.
ORDER = [
    "__init__",
    "errors",
    "atomic",
    "progress",
    "devices",
    "sealed",
    "pattern",
    "layer_mask",
    "overlap",
    "schedules",
    "shards",
    "noise",
    "fallible",
    "native",
    "denormals",
    "products",
    "attention",
    "sources",
    "experts",
    "stored_names",
    "samplers",
    "masks",
    "language_model",
    "prunable",
    "sharding",
    "sparse_linear",
    "loss",
    "priors",
    "data",
    "export",
    "runtime",
    "evaluation",
    "checkpoint_files",
    "recipe",
    "run_folder",
    "checkpoints",
    "resuming",
    "finite",
    "optimization",
    "oneshot",
    "run_settings",
    "learner",
    "footprint",
    "planning",
    "room",
    "summary",
    "module",
    "prox",
    "proxsparse",
    "callbacks",
    "complaints",
    "config_files",
    "sharded_strategy",
    "trainer",
    "api",
    "publishing",
    "bench",
    "figures",
    "comparison",
    "cli",
    "commands",
    "__main__",
]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def level(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported_levels(path: Path, tree: ast.AST) -> set[tuple[str, int]]:
    """The top-level parts of this project that a file imports, with line numbers."""
    found = set()
    package = ("roi_lightning", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {
            (target[1], node.lineno) for target in targets if target[0] == "roi_lightning" and len(target) > 1
        }
    return found


def forbidden(tree: ast.AST) -> set[str]:
    """What a file does that could run somebody else's code."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {
                f"{alias.name}" for alias in node.names if "pickle" in alias.name or alias.name == "dill"
            }
        if isinstance(node, ast.ImportFrom) and ("pickle" in (node.module or "") or node.module == "dill"):
            found.add(str(node.module))
        if isinstance(node, ast.Call):
            literals = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            if literals.get("trust_remote_code") is True:
                found.add("trust_remote_code=True")
            if ast.unparse(node.func) == "torch.load" and literals.get("weights_only") is not True:
                found.add("torch.load without weights_only=True")
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "torch"
            and any(a.name == "load" for a in node.names)
        ):
            found.add("torch.load under another name")
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            if any(
                getattr(k, "value", None) == "trust_remote_code" and getattr(v, "value", None) is True
                for k, v in pairs
            ):
                found.add("trust_remote_code=True")
        if isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            defaults = [*zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True)]
            defaults += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            if any(a.arg == "trust_remote_code" and getattr(d, "value", None) is True for a, d in defaults):
                found.add("trust_remote_code=True")
    return found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_only_from_files_above(path):
    assert level(path) in ORDER, f"{relative(path)}: add {level(path)!r} to ORDER in tests/test_imports.py"
    own = ORDER.index(level(path))
    for name, line in imported_levels(path, ast.parse(path.read_text(encoding="utf-8"))):
        assert name in ORDER, f"{relative(path)}:{line}: add {name!r} to ORDER in tests/test_imports.py"
        same_package = name == level(path) and (ROOT / name).is_dir()
        assert ORDER.index(name) < own or same_package, (
            f"{relative(path)}:{line} imports {name}, which is not above {level(path)}"
        )


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_runs_nobody_elses_code(path):
    assert not forbidden(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "from torch import load",
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "def f(a, trust_remote_code=True): ...",
        "def f(*, trust_remote_code: bool = True): ...",
    ],
)
def test_the_check_itself_notices(text):
    assert forbidden(ast.parse(text))


def test_the_check_itself_lets_good_code_pass():
    good = "torch.load(p, weights_only=True)\ndef f(a=True, trust_remote_code=False): g(trust_remote_code=a)"
    assert not forbidden(ast.parse(good))


def test_import_forms_are_understood():
    lines = [
        "import roi_lightning.a.b, os",
        "from roi_lightning import c",
        "from roi_lightning.d import e",
        "from ..f import g",
        "from . import h",
    ]
    tree = ast.parse("\n".join(lines))
    names = {name for name, _ in imported_levels(ROOT / "data" / "x.py", tree)}
    assert names == {"a", "c", "d", "f", "data"}


def test_the_bare_package_imports_nothing_heavy():
    probe = (
        "import sys, roi_lightning; print(*sorted({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
