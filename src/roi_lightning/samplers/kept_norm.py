"""A reward for keeping large weights: coefficient times the squared norm of the drawn weights, taken off the loss.

The samplers add its gradient to the mask's in fp32 while they have both at hand; through autograd the weights
would be kept a second time, and a bf16 sum would swallow a term this small.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class KeptNorm:
    """The term, for one micro-batch.

    Attributes:
        coefficient: At this optimizer step, above 0.
        value: Sum over layers of the squared Frobenius norm of the drawn weight, fp32 scalar; None before
            the first layer.
        scale: The gradient that reached the loss (below 1 under accumulation), set before the backward pass
            gets to any layer.
    """

    coefficient: float
    value: Tensor | None = None
    scale: Tensor | float = 1.0

    def add(self, drawn: Tensor) -> None:
        """Count one layer's drawn weight, any float dtype."""
        norm = torch.linalg.vector_norm(drawn.detach(), dtype=torch.float32).square()
        self.value = norm if self.value is None else self.value + norm

    def follow(self, loss: Tensor) -> None:
        """Take the scale from the gradient of this loss when it comes."""

        def keep(gradient: Tensor) -> None:
            self.scale = gradient.detach()

        loss.register_hook(keep)

    def pull(self) -> Tensor | float:
        """Factor c of the gradient -c * mask * weight**2 with respect to the mask."""
        return 2.0 * self.coefficient * self.scale

    def pull_on(self, device: torch.device) -> Tensor:
        """The same as a scalar tensor on a device, which the host does not wait for."""
        pull = self.pull()
        return pull if isinstance(pull, Tensor) else torch.full((), pull, device=device)
