"""Bytes that decoding a token reads, and how many tokens memory allows for."""

from torch import Tensor, nn


def weight_bytes(lm: nn.Module) -> int:
    """Bytes of the weights and buffers that every step of decoding reads whole, each storage once.

    Embeddings are left out, of which a step reads a row for each token, unless the head shares their weight. Experts
    count all.
    """
    read: dict[tuple[int, int], int] = {}
    for module in lm.modules():
        if not isinstance(module, nn.Embedding):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                read[_place(tensor)] = tensor.nbytes
    return sum(read.values())


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def mean_cache_bytes(at_the_end: int, prompt: int, tokens: int) -> float:
    """Bytes of keys and values that a step of decoding reads, on average over the steps.

    Args:
        at_the_end: Bytes for all tokens but the last, which no step reads.
        prompt: Tokens before the first new one.
        tokens: New ones; the first comes from the prompt, and each other from a step.
    """
    return at_the_end * (prompt + tokens / 2) / (prompt + tokens - 1)


def most_tokens_per_second(batch: int, bytes_per_step: float, bandwidth: float) -> float:
    """What memory allows: a step gives a token to each sequence.

    Args:
        batch: Sequences.
        bytes_per_step: Weights, and keys and values of all sequences.
        bandwidth: Bytes a second.
    """
    return batch * bandwidth / bytes_per_step
