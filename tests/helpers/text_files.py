"""What the data tests share: a tiny tokenizer, plain-Python references, and a model that writes down what it sees."""

import json
import random
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from roi_lightning.data import CalibrationDataModule

END, BOS = 256, 257
LIGHTNING_REMARKS = [
    pytest.mark.filterwarnings(f"ignore:{remark}")
    for remark in (
        ".*does not have many workers",
        "Checkpoint directory .* exists and is not empty",
        "The dirpath has changed",
    )
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer(around="$A", letters=None):
    """One token per byte, so that token ids can be predicted by hand; the end-of-text id is 256, that of BOS 257.

    `around` says what comes around a text: "<s> $A" for a BOS before it. `letters` may be all that it knows.
    """
    alphabet = sorted(letters or pre_tokenizers.ByteLevel.alphabet())
    special = ["</s>"] if around == "$A" else ["</s>", "<s>"]
    vocabulary = {character: index for index, character in enumerate([*alphabet, *special])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if around != "$A":
        backend.post_processor = processors.TemplateProcessing(
            around, special_tokens=[("</s>", END), ("<s>", BOS)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", model_max_length=16)


class TinyData(CalibrationDataModule):
    """The data module under test with a tokenizer that needs no file."""

    def __init__(self, *args, tokenizer="unused", bos=False, **kwargs):
        super().__init__(tokenizer, *args, **kwargs)
        self.around = "<s> $A" if bos else "$A"

    def load_tokenizer(self):
        return byte_tokenizer(self.around)


def write_jsonl(path: Path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def reference_windows(texts, seq_len, opening=()):
    """Slow packing in plain Python: ids of every text, end-of-text between, whole windows only, all opened alike."""
    tokenizer, stream = byte_tokenizer(), []
    ids = {letter: tokenizer.encode(letter, add_special_tokens=False) for letter in {*"".join(texts)}}
    for number, text in enumerate(texts):
        stream += [END] if number else []
        for letter in text:
            stream += ids[letter]
    length = seq_len - len(opening)
    return [[*opening, *stream[i : i + length]] for i in range(0, len(stream) - length + 1, length)]


def documents(count, mark="", seed=0):
    draw = random.Random(seed)
    return [f"{mark}{i}:" + "".join(draw.choices("abc é", k=draw.randint(5, 90))) for i in range(count)]


def data(tmp_path, corpora=None, **options):
    if corpora is None:
        corpora = write_jsonl(tmp_path / "a.jsonl", documents(300))
    options = {"seq_len": 16, "cache_dir": str(tmp_path / "cache"), "held_out_fraction": 0.2} | options
    return TinyData(corpora=corpora, **options)


class Recorder(LightningModule):
    """A one-layer model that writes down every batch it is given."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(BOS + 1, 2)
        self.seen = []
        self.validated = 0

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].tolist())
        return self.embedding(batch["input_ids"]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.validated += len(batch["input_ids"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, folder, steps, total_steps, resume=None, accumulate=1, model=None, callbacks=(), **options):
    model = model or Recorder()
    saver = ModelCheckpoint(folder, every_n_train_steps=steps, save_top_k=-1, filename="{step}")
    trainer = Trainer(
        max_steps=total_steps,
        accumulate_grad_batches=accumulate,
        callbacks=[saver, *callbacks],
        **{"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        | {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
        | options,
    )
    trainer.fit(model, datamodule=module, ckpt_path=resume, weights_only=True)
    return model, trainer
