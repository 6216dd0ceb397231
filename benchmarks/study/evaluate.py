"""The texts on which every model of a study is measured at the end."""

from pathlib import Path
from typing import Any

from benchmarks.study.cells import Study
from benchmarks.study.work import read_json


def evaluation(study: Study) -> dict[str, Any]:
    """How texts are measured, and which besides those of every study; 0 windows for all."""
    more = {"texts": sorted(study.more_texts)} if study.more_texts else {}
    return {"windows": study.eval_windows, "seq_len": study.eval_seq_len, **more}


def evaluate(study: Study, model: str, folder: Path) -> list[list[str]]:
    """The commands that measure a model."""
    limit = ["--limit", str(study.eval_windows)] if study.eval_windows else []
    common = ["--tasks", "token_perplexity", "--seq_len", str(study.eval_seq_len), *limit]
    return [
        ["evaluate", model, *common, "--text", text, "--json", str(folder / f"{name}.json")]
        for name, text in study.texts.items()
    ]


def measured(study: Study, folder: Path) -> dict[str, float]:
    """What those commands found; infinity is spelled there."""
    found = {}
    for name in study.texts:
        (metrics,) = read_json(folder / f"{name}.json")["models"].values()
        found[name] = float(metrics["token_perplexity"])
    return found
