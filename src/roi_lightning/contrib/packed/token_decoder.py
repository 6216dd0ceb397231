"""One token through all blocks of a model: what `cpp/decode.cpp` wants to know, and the call."""

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from roi_lightning.contrib.packed.cache import PreallocatedLayer
from roi_lightning.contrib.packed.kernels import DTYPES
from roi_lightning.contrib.packed.linear import PackedLinear
from roi_lightning.utils.cpp_extension import Build, FastPath, load, openmp_team, threads_for

kernels = FastPath("decoding is not fused: its C++ kernel can't be compiled here", logging.WARNING)
_SOURCE: Final = Path(__file__).with_name("cpp") / "decode.cpp"
_DENSE, _PACKED, _INT8 = range(3)
# Tokens that a cache has room for at first, beyond those it holds.
_SPARE: Final = 256
# Bytes of a block's weights that are worth another thread.
_MIN_BYTES: Final = 1 << 18


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("values", c_void_p),
        ("indices", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
        ("outputs", c_int64),
        ("kept", c_int64),
        ("kind", c_int64),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((f"{name}_norm", c_void_p) for name in ("attention", "query", "key", "mlp")),
        *((name, _Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class _Token(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, c_int64) for name in ("count", "hidden", "inner", "heads", "kv_heads", "head")),
        ("epsilon", c_double),
        ("scale", c_double),
        *((name, c_void_p) for name in ("norm", "parallel", "number_of", "count_of")),
        ("threads", c_int64),
        *((name, c_void_p) for name in ("embedded", "out", "cosines", "sines")),
        ("length", c_int64),
        ("capacity", c_int64),
    )


class TokenDecoder:
    """Takes a llama-like model on the CPU through one token after another, of one sequence.

    It reads the weights where they lie. When another text begins, which `goes_on` notices, another one is to be made.

    Args:
        model: The inner model, with what `why_not_fused` looks for.
    """

    def __init__(self, model: Any) -> None:
        self._held: list[Tensor] = []  # what the C++ code has the address of
        self._rotary, self._writer, self._busy = model.rotary_emb, object(), Lock()
        self._cosines = self._sines = torch.empty(0)
        blocks = list(model.layers)
        attention, mlp = blocks[0].self_attn, blocks[0].mlp
        self._layers = (_Layer * len(blocks))(*map(self._layer, blocks))
        self._token = _Token(
            layers=self._layers,
            count=len(blocks),
            hidden=model.config.hidden_size,
            inner=mlp.gate_proj.out_features,
            heads=attention.q_proj.out_features // attention.head_dim,
            kv_heads=attention.k_proj.out_features // attention.head_dim,
            head=attention.head_dim,
            epsilon=model.norm.variance_epsilon,
            scale=attention.scaling,
            norm=self._address(model.norm.weight),
        )
        self._call: Any = library(model.dtype).decode_token  # type: ignore[union-attr]
        self._bytes = sum(layer.weight.nbytes for layer in linear_layers(blocks[0]))

    def goes_on(self, model: Any, past: Any) -> bool:
        """Whether a cache ends with what it wrote there, and a model's last norm lies where it did."""
        return self._wrote(past) and bool(model.norm.weight.data_ptr() == self._token.norm)

    def _wrote(self, past: Any) -> bool:
        return all(isinstance(x, PreallocatedLayer) and x.writer is self._writer for x in past.layers)

    def step(self, embedded: Tensor, position: int, past: DynamicCache) -> Tensor:
        """One token.

        Args:
            embedded: [1, 1, hidden], of the model's dtype.
            position: Its position.
            past: What is before it; it is appended there.

        Returns:
            The hidden state behind the last norm, [1, 1, hidden], of the same dtype.

        Raises:
            MemoryError: If there is no memory for it.
        """
        out = torch.empty_like(embedded)
        with self._busy:
            self._step(embedded, out, position, past)
        return out

    def _step(self, embedded: Tensor, out: Tensor, position: int, past: Any) -> None:
        token, length = self._token, past.get_seq_length()
        self._attach(past, length, position)
        token.embedded, token.out, token.length = embedded.data_ptr(), out.data_ptr(), length
        place = position * self._cosines.stride(0) * self._cosines.itemsize
        token.cosines, token.sines = self._cosines.data_ptr() + place, self._sines.data_ptr() + place
        token.parallel, token.number_of, token.count_of = openmp_team()
        token.threads = threads_for(self._bytes, _MIN_BYTES)
        if self._call(ctypes.byref(token)):
            raise MemoryError("no memory for the hidden states of a token")
        for layer in past.layers:
            layer.append()

    def _attach(self, past: Any, length: int, position: int) -> None:
        """See that every layer of the cache has room, and that its address is known."""
        if not self._wrote(past) or length == self._token.capacity:
            self._writer, self._token.capacity = object(), max(2 * length, length + _SPARE)
            past.layers[:] = [
                x if isinstance(x, PreallocatedLayer) else PreallocatedLayer.of(x) for x in past.layers
            ]
            for block, layer in zip(self._layers, past.layers, strict=True):
                block.keys, block.values = layer.grow(self._token.capacity, self._writer)
        if position >= len(self._cosines):
            self._learn_positions(max(2 * position, position + _SPARE))

    def _learn_positions(self, count: int) -> None:
        like = torch.empty(1, dtype=torch.float32)
        cosines, sines = self._rotary(like, position_ids=torch.arange(count)[None])
        half = self._token.head // 2  # behind it they come again
        self._cosines, self._sines = cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()

    def _layer(self, block: Any) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        query, key = (None if norm is None else self._address(norm.weight) for norm in norms)
        return _Layer(
            attention_norm=self._address(block.input_layernorm.weight),
            query_norm=query,
            key_norm=key,
            mlp_norm=self._address(block.post_attention_layernorm.weight),
            query=self._matrix(attention.q_proj),
            key=self._matrix(attention.k_proj),
            value=self._matrix(attention.v_proj),
            output=self._matrix(attention.o_proj),
            gate=self._matrix(mlp.gate_proj),
            up=self._matrix(mlp.up_proj),
            down=self._matrix(mlp.down_proj),
        )

    def _matrix(self, layer: nn.Linear | PackedLinear) -> _Matrix:
        bias = None if layer.bias is None else self._address(layer.bias)
        values, (outputs, kept) = self._address(layer.weight), layer.weight.shape
        if not isinstance(layer, PackedLinear):
            return _Matrix(values=values, bias=bias, outputs=outputs, kept=kept, kind=_DENSE)
        indices, scales = self._address(layer.weight_indices), layer.weight_scales
        return _Matrix(
            values=values,
            indices=indices,
            scales=None if scales is None else self._address(scales),
            bias=bias,
            outputs=outputs,
            kept=kept,
            kind=_PACKED if scales is None else _INT8,
        )

    def _address(self, tensor: Tensor) -> int:
        self._held.append(tensor.detach())
        return tensor.data_ptr()


@cache
def library(dtype: torch.dtype) -> Any | None:
    """The compiled function for a model of a dtype; None if there can be none."""
    if dtype not in DTYPES:
        return None
    build = Build(_SOURCE, (("WEIGHT", DTYPES[dtype]),))
    if not kernels.attempt(lambda: load(build)):
        return None
    compiled = load(build)
    compiled.decode_token.argtypes = (c_void_p,)
    return compiled


def linear_layers(block: Any) -> Sequence[Any]:
    """The linear layers of a block."""
    attention, mlp = block.self_attn, block.mlp
    return (
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    )
