"""The text of this project: source code of installed Python packages."""

from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from datasets import Dataset
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule, Corpus
from roi_lightning.errors import UserError


class PackageText(CalibrationDataModule):
    """Reads each corpus as the name of an installed package; every file of it is a document.

    Args:
        min_characters: Shorter files are left out.
        kwargs: As in `CalibrationDataModule`.
    """

    def __init__(self, tokenizer: str, min_characters: int = 200, **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        self.min_characters = min_characters

    @override
    def read_corpus(self, corpus: Corpus) -> Dataset:
        spec = find_spec(corpus.source) if corpus.source.isidentifier() else None
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                f"corpus {corpus.source!r} is no installed package; give the name of one, such as json"
            )
        files = sorted(Path(spec.submodule_search_locations[0]).rglob("*.py"))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
        return Dataset.from_dict({"text": [text for text in texts if len(text) >= self.min_characters]})

    @override
    def recipe(self) -> dict[str, Any]:
        # What the text depends on: a run does not resume on another.
        names = {name for corpus in self.corpora for name in packages_distributions().get(corpus.source, [])}
        versions = {name: version(name) for name in sorted(names)}
        return super().recipe() | {"data.versions": versions, "data.min_characters": self.min_characters}
