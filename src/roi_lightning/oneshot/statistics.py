"""What is remembered of the inputs that a layer meets: sums over tokens, in fp32, never the inputs."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from roi_lightning.errors import UserError


class InputStatistics(ABC):
    """A sum over tokens.

    Attributes:
        total: The sum, fp32.
        tokens: How many tokens were added.
    """

    def __init__(self, shape: tuple[int, ...], on: torch.device) -> None:
        self.total = torch.zeros(shape, dtype=torch.float32, device=on)
        self.tokens = 0

    def add(self, inputs: Tensor) -> None:
        """Add the inputs of one forward pass, [..., in]."""
        rows = inputs.detach().flatten(0, -2).float()
        self._accumulate(rows)
        self.tokens += len(rows)

    @abstractmethod
    def _accumulate(self, rows: Tensor) -> None: ...

    def check(self, name: str) -> None:
        """Refuse to go on with sums that say nothing.

        Raises:
            UserError: If no token came by, or a sum is infinite or not a number.
        """
        if not self.tokens:
            raise UserError(
                f"{name} met no token of the calibration text; give more windows or ignore the layer"
            )
        if not self.total.isfinite().all():
            raise UserError(
                f"{name} met inputs that are infinite or not numbers; load the model in another --dtype "
                "or leave the layer out"
            )


class SquareSums(InputStatistics):
    """Sum of squares of every input, [in]."""

    def __init__(self, size: int, on: torch.device) -> None:
        super().__init__((size,), on)

    @override
    def _accumulate(self, rows: Tensor) -> None:
        self.total += rows.square().sum(0)


class ProductSums(InputStatistics):
    """Sum of products of every two inputs, [in, in]."""

    def __init__(self, size: int, on: torch.device) -> None:
        super().__init__((size, size), on)

    @override
    def _accumulate(self, rows: Tensor) -> None:
        with exact_products():
            self.total.addmm_(rows.T, rows)


@contextmanager
def exact_products() -> Iterator[None]:
    """Matrix products in full fp32: TF32 has ten bits of mantissa, too few for a factorisation."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
