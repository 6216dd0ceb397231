"""Rules about the source text: who may import whom, and what may not be written at all."""

import ast
import runpy
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import roi_lightning

ROOT = Path(roi_lightning.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[1]
FILES = sorted(ROOT.rglob("*.py"))
DRAWING = runpy.run_path(str(REPOSITORY / "docs" / "draw_rooms.py"))
ORDER = DRAWING["ORDER"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("roi_lightning", *(parts[:-1] if parts[-1] == "__init__" else parts)))


MODULES_HERE = {module_name(path): path for path in FILES}


def imported_modules(path: Path, tree: ast.AST) -> set[tuple[str, int]]:
    """The modules of this project that a file imports, with line numbers."""
    found = set()
    package = ("roi_lightning", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            module = ".".join(base)
            named = [f"{module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES_HERE else module for name in named]
        else:
            continue
        found |= {(name, node.lineno) for name in names if name.split(".")[0] == "roi_lightning"}
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


def test_the_root_holds_three_files_and_the_rooms():
    assert dir(roi_lightning) == roi_lightning.__all__
    files = {path.stem for path in ROOT.glob("*.py")}
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert files == {"__init__", "__main__", "errors"}
    assert files - {"__init__"} | rooms == set(ORDER)


def test_rooms_import_only_from_rooms_before_them():
    for path in FILES:
        room = module_name(path).split(".")[1:2]
        if not room:
            continue  # the package's own face, which loads its names when asked for
        for name, line in imported_modules(path, ast.parse(path.read_text(encoding="utf-8"))):
            other = name.split(".")[1:2]
            assert other, f"{path}:{line} imports the whole package"
            assert ORDER.index(other[0]) <= ORDER.index(room[0]), f"{path}:{line} imports {name} from above"


def test_no_cycle_inside_a_room():
    graph = {
        name: {other for other, _ in imported_modules(path, ast.parse(path.read_text(encoding="utf-8")))}
        for name, path in MODULES_HERE.items()
        if name != "roi_lightning"
    }
    # Raises CycleError, which names the cycle. A package's __init__ imports from its files, never they from it.
    list(TopologicalSorter(graph).static_order())


def test_every_room_says_in_a_sentence_what_it_is():
    for name in ORDER:
        assert DRAWING["sentence"](name).endswith("."), name


def test_the_picture_of_the_rooms_is_up_to_date():
    assert DRAWING["PICTURE"].read_text() == DRAWING["picture"](), "run: python docs/draw_rooms.py"


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
        "import roi_lightning.masks.pattern, os",
        "from roi_lightning import errors",
        "from roi_lightning.models.source import e",
        "from ..utils import progress",
        "from . import packing",
    ]
    tree = ast.parse("\n".join(lines))
    names = {
        name.removeprefix("roi_lightning.") for name, _ in imported_modules(ROOT / "data" / "x.py", tree)
    }
    assert names == {"masks.pattern", "errors", "models.source", "utils.progress", "data.packing"}


def test_the_parts_of_contrib_know_nothing_of_each_other():
    for path in (ROOT / "contrib").glob("*/**/*.py"):  # beside them stand commands
        part = module_name(path).split(".")[2:3]
        for name, line in imported_modules(path, ast.parse(path.read_text(encoding="utf-8"))):
            if name.startswith("roi_lightning.contrib."):
                assert name.split(".")[2:3] == part, f"{path}:{line} imports {name} from another part"
