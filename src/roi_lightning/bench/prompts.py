"""Prompts of a given length."""

import sysconfig
from itertools import cycle, islice

import numpy as np
import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from roi_lightning.data.packing import Packer, find_bos, tokenize
from roi_lightning.data.python_docs import python_documents


def text_prompts(tokenizer: PreTrainedTokenizerBase, batch: int, length: int) -> Tensor:
    """Consecutive stretches of the documentation that comes with Python, over and over, int64 [batch, length].

    Each begins with the BOS that the tokenizer puts before a text, if it does.
    """
    packer = Packer(length, None, find_bos(tokenizer))
    documents = cycle(python_documents(sysconfig.get_paths()["stdlib"], ""))
    windows = (window for x in documents for window in packer(tokenize([x["text"]], tokenizer)))
    return torch.from_numpy(np.stack([*islice(windows, batch)])).long()


def random_prompts(vocabulary: int, batch: int, length: int) -> Tensor:
    """The same random tokens every time, int64 [batch, length]."""
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
