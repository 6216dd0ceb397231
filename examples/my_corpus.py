"""A corpus of your own: text in a table of SQLite files.

    roi-lightning fit --config quickstart.yaml --data my_corpus.TableText --data.corpora my.db --data.column body

A data module opens a corpus as documents with a column `text`; splitting, tokenising, packing, the order and its
resume follow. For text that is read while training, override `stream`.
"""

import sqlite3
from typing import Any

from datasets import Dataset
from typing_extensions import override

from roi_lightning.data import CalibrationDataModule, Corpus


class TableText(CalibrationDataModule):
    """Reads each corpus as an SQLite file.

    Args:
        table: Its table.
        column: The column that holds the text.
        kwargs: As in `CalibrationDataModule`.
    """

    def __init__(self, tokenizer: str, table: str = "documents", column: str = "text", **kwargs: Any) -> None:
        super().__init__(tokenizer, **kwargs)
        self.table, self.column = table, column

    @override
    def read_corpus(self, corpus: Corpus) -> Dataset:
        rows = sqlite3.connect(corpus.source).execute(f'select "{self.column}" from "{self.table}"')
        return Dataset.from_dict({"text": [text for (text,) in rows]})

    @override
    def recipe(self) -> dict[str, Any]:
        return super().recipe() | {"data.table": self.table, "data.column": self.column}
