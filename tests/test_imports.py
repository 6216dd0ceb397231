"""Rules about the source text: who may import whom, and what may not be written at all."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import roi_lightning

ROOT = Path(roi_lightning.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[1]
FILES = sorted(ROOT.rglob("*.py"))
# Every file imports only from those above it; the files of one package may import each other.
ORDER = [
    "errors",
    "tables",
    "losses",
    "experts",
    "noise",
    "dtensor",
    "overlap",
    "progress",
    "pattern",
    "config_files",
    "stored_tensors",
    "mask_file",
    "atomic",
    "layer_mask",
    "schedules",
    "third_party",
    "summary_table",
    "proximal",
    "source",
    "checkpoint_io",
    "cpp_extension",
    "masks",
    "weight_names",
    "config",
    "devices",
    "samplers",
    "comparison",
    "figures",
    "freezing",
    "data",
    "masked_linear",
    "compare_report",
    "layers",
    "loading",
    "optim",
    "fsdp",
    "export",
    "recipe",
    "run_folder",
    "runtime",
    "publishing",
    "oneshot",
    "resume",
    "evaluation",
    "bench",
    "priors",
    "nonfinite",
    "steps",
    "learner",
    "memory_tracker",
    "module",
    "proxsparse",
    "memory_plan",
    "callbacks",
    "trainer",
    "cli",
    "api",
    "commands",
    "__main__",
    "__init__",
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


# What reads or runs other people's code: modules, calls by name, and arguments that may not be True.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
CALLS |= {f"yaml.{name}" for name in ("load", "load_all", "full_load", "unsafe_load", "unsafe_load_all")}
NEVER = {"trust_remote_code": True, "allow_pickle": True, "shell": True}


def forbidden(tree: ast.AST) -> set[str]:
    """What a file does that could run somebody else's code."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in MODULES}
        if isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & (CALLS | {"torch.load"})
            found |= {str(node.module)} if str(node.module).split(".")[0] in MODULES else set()
        if isinstance(node, ast.Call):
            called, given = ast.unparse(node.func), {x.arg: _literal(x.value) for x in node.keywords}
            found |= {called} & CALLS
            found |= {f"{name}={value}" for name, value in NEVER.items() if given.get(name) is value}
            if called == "torch.load" and given.get("weights_only") is not True:
                found.add("torch.load without weights_only=True")
        if isinstance(node, ast.Dict):
            given = {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True)}
            found |= {f"{name}={value}" for name, value in NEVER.items() if given.get(name) is value}
        if isinstance(node, ast.arguments):
            named = [*node.posonlyargs, *node.args]
            defaults = [*zip(named[len(named) - len(node.defaults) :], node.defaults, strict=True)]
            defaults += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            found |= {
                f"{a.arg}={_literal(d)}" for a, d in defaults if NEVER.get(a.arg) and _literal(d) is True
            }
    return found


def _literal(node: ast.AST | None) -> object:
    return getattr(node, "value", None)


def test_files_import_only_from_files_above():
    for path in FILES:
        assert level(path) in ORDER, (
            f"{relative(path)}: add {level(path)!r} to ORDER in tests/test_imports.py"
        )
        own = ORDER.index(level(path))
        for name, line in imported_levels(path, ast.parse(path.read_text(encoding="utf-8"))):
            assert name in ORDER, f"{relative(path)}:{line}: add {name!r} to ORDER in tests/test_imports.py"
            same_package = name == level(path) and (ROOT / name).is_dir()
            assert ORDER.index(name) < own or same_package, (
                f"{relative(path)}:{line} imports {name}, which is not above {level(path)}"
            )


def test_nobody_elses_code_is_run():
    others = [path for folder in ("benchmarks", "examples") for path in (REPOSITORY / folder).rglob("*.py")]
    assert len(others) > 10
    for path in [*FILES, *others]:
        assert not forbidden(ast.parse(path.read_text(encoding="utf-8"))), path


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import joblib.numpy_pickle",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "from torch import load",
        "f(trust_remote_code=True)",
        "f(**{'trust_remote_code': True})",
        "def f(a, trust_remote_code=True): ...",
        "def f(*, trust_remote_code: bool = True): ...",
        "eval(text)",
        "exec(text)",
        "exec(compile(text, '', 'exec'))",
        "__import__(name)",
        "os.system(text)",
        "from os import system",
        "yaml.load(file)",
        "from yaml import unsafe_load",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_check_itself_notices(text):
    assert forbidden(ast.parse(text))


def test_the_check_itself_lets_good_code_pass():
    good = (
        "torch.load(p, weights_only=True)\ndef f(a=True, trust_remote_code=False): g(trust_remote_code=a)\n"
    )
    good += "lm.eval(), torch.compile(lm), re.compile(x), yaml.safe_load(p), run(x, shell=False), np.load(p)"
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
