"""The LightningDataModule that feeds calibration windows, in an order that survives interruption."""

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from typing_extensions import override

from roi_lightning.data import packing
from roi_lightning.data.chats import ChatTokenizer
from roi_lightning.data.corpora import Corpus, as_corpora, cache_remedy, describe, load_documents
from roi_lightning.data.files import readable
from roi_lightning.data.packing import Side, TextTokenizer, as_batch
from roi_lightning.data.resumable_order import ResumableLoader, ResumableSampler, evenly_spaced, mix
from roi_lightning.data.streaming import (
    PROGRESS,
    StreamedBatches,
    StreamLoader,
    StreamState,
    Substream,
    WindowReader,
    make_substreams,
)
from roi_lightning.errors import UserError, check_at_least
from roi_lightning.models import config

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset


class CalibrationDataModule(LightningDataModule):
    """Windows of calibration text, for training and for held-out measurement.

    Batches are `{"input_ids": int64 [batch, seq_len]}`. Where only the answers of chats count they have `labels` too,
    the same with -100 in place of tokens that don't count; windows in which none counts are left out.

    Every rank validates on all held-out windows; the training windows are divided over ranks here, so build the
    Trainer with `use_distributed_sampler=False`.
    Where the tokenizer puts a BOS before a text, every window is that BOS and `seq_len - 1` tokens of text.

    Args:
        tokenizer: Model or folder whose tokenizer to use; from Python also the tokenizer itself.
        tokenizer_revision: Commit, tag or branch of the tokenizer on the hub.
        trust_remote_code: Whether the tokenizer may run code from its repository.
        corpora: Training text: `python-docs`, files, globs, hub ids, or mappings with the fields of Corpus.
        val_corpora: Held-out text; if left out, some of the training documents are held out.
        seq_len: Window length in tokens, BOS included.
        batch_size: Windows per micro-batch on each device, in training.
        windows_per_step: Windows per optimizer step, over all micro-batches and devices; if left out, one micro-batch
            on each device. `trainer.accumulate_grad_batches`, if given (to Lightning's own Trainer: above 1), wins.
        val_batch_size: Windows per batch in validation; if left out, `batch_size`.
        held_out_fraction: Fraction of the documents to hold out, between 0 and 1, if there is no `val_corpora`.
        val_windows: Largest number of held-out windows to use, evenly spaced over the held-out text.
        num_workers: Loader processes for training; with streamed text they tokenise, too.
        seed: Seed of the training order.
        cache_dir: Folder for prepared data; if left out, the folder of the `datasets` library.

    Raises:
        UserError: If a number is out of range; later, if a corpus cannot be read or is too short.
    """

    def __init__(
        self,
        tokenizer: config.NamedTokenizer,
        tokenizer_revision: str | None = None,
        trust_remote_code: bool = False,
        # str comes first: jsonargparse reads an existing file given for a list as one item per line
        corpora: str | Corpus | list[Corpus | str] = "python-docs",
        val_corpora: str | Corpus | list[Corpus | str] | None = None,
        seq_len: int = 1024,
        batch_size: int = 1,
        windows_per_step: int | None = None,
        val_batch_size: int | None = None,
        held_out_fraction: float = 0.03,
        val_windows: int = 16,
        num_workers: int = 0,
        seed: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        self.val_batch_size = batch_size if val_batch_size is None else val_batch_size
        if not 0 < held_out_fraction < 1:
            raise UserError(f"data.held_out_fraction is {held_out_fraction}; set it between 0 and 1")
        self.tokenizer = tokenizer if isinstance(tokenizer, str) else tokenizer.name_or_path
        if not isinstance(tokenizer, str):
            self.text_tokenizer = tokenizer
        self.tokenizer_revision, self.trust_remote_code = tokenizer_revision, trust_remote_code
        self.corpora = as_corpora(corpora)
        self.val_corpora = None if val_corpora is None else as_corpora(val_corpora)
        self.seq_len, self.batch_size, self.seed = seq_len, batch_size, seed
        self.windows_per_step = windows_per_step
        self.held_out_fraction, self.val_windows = held_out_fraction, val_windows
        self.num_workers, self.cache_dir = num_workers, cache_dir
        self._state: StreamState | None = None
        self._model: PreTrainedConfig | None = None
        # The first token of a window is given, the others are predicted.
        check_at_least(self, "data.", seq_len=2, batch_size=1, val_batch_size=1, windows_per_step=1)
        check_at_least(self, "data.", val_windows=1, num_workers=0, seed=0)

    @property
    def train_tokens(self) -> int:
        """Tokens in the distinct training windows; 0 for streamed corpora, whose length is unknown."""
        return self.seq_len * sum(map(len, self._packed))

    @property
    def val_tokens(self) -> int:
        """Tokens in the held-out windows that are used."""
        return self._held_out.numel()

    def micro_batches(self, ranks: int) -> int:
        """How many micro-batches of an optimizer step each of so many ranks takes.

        Raises:
            UserError: If they can't take `windows_per_step` windows, naming the nearest values that they can.
        """
        if self.windows_per_step is None:
            return 1
        count, rest = divmod(self.windows_per_step, ranks * self.batch_size)
        if not rest:
            return count
        near = [str(n * ranks * self.batch_size) for n in (count, count + 1) if n]
        sizes = [n for n in range(self.batch_size - 1, 0, -1) if self.windows_per_step % (ranks * n) == 0]
        near += [f"data.batch_size to {sizes[0]}"] if sizes else []
        raise UserError(
            f"data.windows_per_step is {self.windows_per_step}, no multiple of {ranks} x {self.batch_size} windows "
            f"(devices x data.batch_size); set it to {' or '.join(near)}"
        )

    def check_model(self, spec: str, model: PreTrainedConfig) -> None:
        """Refuse windows longer than the model of a configuration takes, later those with tokens unknown to it."""
        longest = config.max_positions(model)
        if longest is not None and self.seq_len > longest:
            raise UserError(
                f"seq_len is {self.seq_len} and model {spec!r} reads at most {longest} tokens; lower it"
            )
        self._model = model

    def check_files(self) -> None:
        """Look for the files that corpora name, and read none.

        Raises:
            UserError: If there are none.
        """
        for corpus in (*self.corpora, *(self.val_corpora or ())):
            describe(corpus)

    def facts(self, windows: int) -> dict[str, object]:
        """What an export records of the text that a mask was learned from in so many windows; plain values."""
        text = ", ".join(corpus.source for corpus in self.corpora)
        chats = sorted({f"loss on {corpus.loss_on}" for corpus in self.corpora if corpus.messages_field})
        kind = {"chats": " and ".join(chats)} if chats else {}
        return {"text": text, **kind, "seq_len": self.seq_len, "tokens": windows * self.seq_len}

    def prepare_data(self) -> None:
        """Fill the caches in one process, so that the others only read them."""
        if self.trainer is not None and self.trainer.world_size > 1:
            _ = self._substreams or self._mixed, self._held_out

    def setup(self, stage: str) -> None:
        """Read, tokenise and pack: training and held-out windows for `fit`, else held-out ones alone."""
        self._state, parts = None, []
        if stage == "fit":
            count, used = self.train_tokens // self.seq_len, ", ".join(each.source for each in self.corpora)
            size = f"{count:,} windows of {self.seq_len:,} tokens ({self.train_tokens / 1e6:.2f} M tokens)"
            if self._substreams:
                self._state, size = StreamState(self._described(), self._micro_batch), "streamed windows"
            parts.append(f"{size} from {used}")
            if trainer := self.trainer:
                # RoITrainer has counted; of Lightning's own only a number above 1 is known to be asked for.
                if not hasattr(trainer, "count_micro_batches") and trainer.accumulate_grad_batches == 1:
                    trainer.accumulate_grad_batches = self.micro_batches(trainer.world_size)
                ranks, each = trainer.world_size, trainer.accumulate_grad_batches
                made_of = f"devices {ranks} x micro-batches {each} x data.batch_size {self.batch_size}"
                parts.append(f"windows of a step: {ranks * each * self.batch_size} ({made_of})")
        parts.append(f"{self.val_tokens // self.seq_len:,} held-out windows")
        rank_zero_info(f"calibration: {'; '.join(parts)}")

    def train_dataloader(self) -> ResumableLoader:
        """One epoch as long as the run, starting at the trainer's step, or at the position in streamed text.

        Raises:
            UserError: If the trainer has no `max_steps`.
        """
        trainer = self.trainer
        if trainer is None or trainer.max_steps < 1:
            raise UserError("the length of the run is unknown; set trainer.max_steps")
        rank, world_size = trainer.global_rank, trainer.world_size
        if self._state is not None:
            batches = StreamedBatches(self._substreams, self.batch_size, rank, world_size)
            return StreamLoader(batches, self._state.begin, self.num_workers)
        mixed, count = self._mixed, trainer.max_steps * trainer.accumulate_grad_batches
        sampler = ResumableSampler(
            len(mixed), count, self.batch_size, self.seed, rank, world_size, start=self._micro_batch
        )
        return ResumableLoader(
            mixed, self.batch_size, sampler=sampler, num_workers=self.num_workers, collate_fn=_collate
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """All held-out windows that are used, in order, on every rank."""
        rows = [{"input_ids": window} for window in self._held_out]
        return DataLoader(cast("TorchDataset[Any]", rows), self.val_batch_size, collate_fn=_collate)

    def windows(self, split: Literal["train", "val"], count: int) -> Tensor:
        """The first windows of a split, the same on every rank.

        Args:
            split: `train` for the order of training (repeated after its end), `val` for the held-out ones.
            count: How many windows.

        Returns:
            Token ids, int64 `[count, seq_len]`.

        Raises:
            UserError: If `count` is not positive or fewer held-out windows exist.
        """
        if count < 1:
            raise UserError(f"{count} windows wanted; ask for at least 1")
        if split == "val":
            available = len(self._held_out)
            if count <= available:
                return as_batch(self._held_out[:count])["input_ids"]
            raise UserError(f"{count} held-out windows wanted, {available} in use; raise data.val_windows")
        if self._substreams:
            batches = StreamedBatches(self._substreams, self.batch_size)
            rows = chain.from_iterable(batch["input_ids"] for batch in batches)
            return torch.stack(list(islice(rows, count)))
        sampler = ResumableSampler(len(self._mixed), count, seed=self.seed)
        return as_batch(self._mixed[list(sampler)]["input_ids"])["input_ids"]

    def held_out_labels(self, count: int) -> Tensor | None:
        """The labels of the first held-out windows, int64 `[count, seq_len]`; None where every token counts."""
        return as_batch(self._held_out[:count]).get("labels")

    def read_corpus(self, corpus: Corpus) -> "Dataset | IterableDataset":
        """Open the documents of a corpus, one column `text`; override it to read text of your own.

        Every call must give the same. Chats stand there as a `chats.chat_document`.
        """
        return load_documents(corpus, self.cache_dir)

    def stream(self, corpus: Corpus) -> "IterableDataset":
        """Open the documents of a streamed corpus, one column `text`; override it to stream text of your own.

        The finer the shards, the less a resumed run reads again; every call must give the same.
        """
        documents = self.read_corpus(corpus)
        return documents if corpus.streaming else documents.to_iterable_dataset()

    @cached_property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of all windows, loaded once."""
        return self.load_tokenizer()

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer; called once. Override it to use one of your own."""
        return config.load_tokenizer(self.tokenizer, self.tokenizer_revision, self.trust_remote_code)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self._state is not None and PROGRESS in batch:
            self._state.use(batch.pop(PROGRESS))
        return batch

    @override
    def state_dict(self) -> dict[str, Any]:
        """The position in streamed text, collected from every rank; nothing for corpora with random access."""
        return {} if self._state is None else self._state.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a position in streamed text, if it is this text's."""
        if self._state is not None:
            self._state.load_state_dict(state_dict)

    def _micro_batch(self) -> int:
        """Micro-batches that each rank has put into optimizer steps."""
        trainer = self.trainer
        assert trainer is not None
        return trainer.global_step * trainer.accumulate_grad_batches

    @property
    def _side(self) -> Side:
        """The side of the documents of `corpora` that is trained on."""
        return "train" if self.val_corpora is None else "all"

    @property
    def _weights(self) -> list[float]:
        return [corpus.weight for corpus in self.corpora]

    @cached_property
    def _substreams(self) -> list[Substream]:
        """Training text if any corpus is streamed, else nothing."""
        if not any(corpus.streaming for corpus in self.corpora):
            return []
        readers = [self._reader(corpus, self._side) for corpus in self.corpora]
        substreams = make_substreams(readers, self._weights, self.seed)
        for reader in substreams[0].readers:  # raises here and now for text that fills no window
            next(reader.windows())
        return substreams

    @cached_property
    def _packed(self) -> "list[Dataset]":
        """Training windows by corpus if none is streamed, else nothing."""
        return [] if self._substreams else [self._pack(corpus, self._side) for corpus in self.corpora]

    @cached_property
    def _mixed(self) -> "Dataset":
        return mix(self._packed, self._weights, self.seed)

    @cached_property
    def _held_out(self) -> Tensor:
        side: Side = "val" if self.val_corpora is None else "all"
        sources: list[Sequence[Tensor]] = [
            [window for window, _ in islice(self._reader(corpus, side).once(), self.val_windows)]
            if corpus.streaming
            else self._pack(corpus, side)["input_ids"]
            for corpus in self.val_corpora or self.corpora
        ]
        chosen = evenly_spaced([len(source) for source in sources], self.val_windows)
        rows = [source[i] for source, indices in zip(sources, chosen, strict=True) for i in indices]
        if not rows:
            share = f"a fraction of {self.held_out_fraction} of the documents"
            raise UserError(
                f"the held-out text ({share}) is shorter than one window of {self.seq_len} tokens; raise "
                "data.held_out_fraction (0.2, say), lower data.seq_len, give more text or pass data.val_corpora"
            )
        return torch.stack(rows)

    def _pack(self, corpus: Corpus, side: Side) -> "Dataset":
        texts = self.read_corpus(corpus)
        with readable(corpus.source, cache_remedy(self.cache_dir), (OSError, UnicodeError)):
            texts = packing.select_side(texts, side, self.held_out_fraction)
            return packing.pack_side(texts, side, self._convert(corpus), self.seq_len).with_format("torch")

    def _reader(self, corpus: Corpus, side: Side) -> WindowReader:
        keeps = partial(packing.belongs, side=side, held_out_fraction=self.held_out_fraction)
        documents = self.stream(corpus)
        shards = range(documents.num_shards)
        return WindowReader(documents, keeps, self._convert(corpus), self.seq_len, shards)

    def _convert(self, corpus: Corpus) -> TextTokenizer:
        """What makes tokens of the documents of a corpus."""
        if corpus.messages_field is None:
            return TextTokenizer(self.text_tokenizer, corpus.source, self._model)
        return ChatTokenizer(self.text_tokenizer, corpus.source, self._model, corpus.loss_on == "answers")

    def recipe(self) -> dict[str, Any]:
        """What the training windows and their order depend on, by option; the text itself is not read."""
        bos = packing.find_bos(self.text_tokenizer)
        converted = map(self._convert, self.corpora)
        template = next((x.template_digest for x in converted if isinstance(x, ChatTokenizer)), None)
        found = {"data.bos": bos, "data.chat_template": template}
        return {name: value for name, value in found.items() if value is not None} | {
            "data.corpora": list(map(describe, self.corpora)),
            "data.tokenizer": packing.identity(self.text_tokenizer),
            "data.seq_len": self.seq_len,
            "data.seed": self.seed,
            "data.held_out_fraction": self.held_out_fraction if self.val_corpora is None else None,
        }

    def _described(self) -> dict[str, Any]:
        """What the windows of streamed text and their order depend on, by option, as checkpoints hold it."""
        corpora = [
            describe(corpus) | {"shards": reader.documents.num_shards}
            for corpus, reader in zip(self.corpora, self._substreams[0].readers, strict=True)
        ]
        return self.recipe() | {"data.corpora": corpora, "lanes": len(self._substreams)}


def _collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return as_batch(torch.stack([row["input_ids"] for row in rows]))
