"""Prompts of a given length."""

import sysconfig
from itertools import cycle

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.python_docs import python_documents


def text_prompts(tokenizer: PreTrainedTokenizerBase, batch: int, length: int) -> Tensor:
    """Consecutive stretches of the documentation that comes with Python, over and over, int64 [batch, length]."""
    ids: list[int] = []
    for document in cycle(python_documents(sysconfig.get_paths()["stdlib"], "")):
        ids += tokenizer(document["text"], add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= batch * length:
            break
    return torch.tensor(ids[: batch * length]).view(batch, length)


def random_prompts(vocabulary: int, batch: int, length: int) -> Tensor:
    """The same random tokens every time, int64 [batch, length]."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
