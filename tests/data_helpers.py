"""What the data tests share: a tiny tokenizer and plain-Python references."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roi_lightning.data import CalibrationDataModule

END = 256


def byte_tokenizer():
    """One token per byte, so that token ids can be predicted by hand; the end-of-text id is 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "</s>"])}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", model_max_length=16)


class TinyData(CalibrationDataModule):
    """The data module under test with a tokenizer that needs no file."""

    def __init__(self, *args, tokenizer="unused", **kwargs):
        super().__init__(tokenizer, *args, **kwargs)

    def _tokenizer(self):
        return byte_tokenizer()


def write_jsonl(path: Path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(path)


def decode(windows):
    """Text of each window, with the end-of-text mark spelled out."""
    tokenizer = byte_tokenizer()
    return [tokenizer.decode(row.tolist(), clean_up_tokenization_spaces=False) for row in windows]


def reference_windows(texts, seq_len):
    """Slow packing in plain Python: ids of every text, end-of-text between, whole windows only."""
    tokenizer = byte_tokenizer()
    stream = []
    for number, text in enumerate(texts):
        stream += [END] if number else []
        for character in text:
            stream += tokenizer.encode(character, add_special_tokens=False)
    return [stream[i : i + seq_len] for i in range(0, len(stream) - seq_len + 1, seq_len)]
