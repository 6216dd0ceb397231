"""`python -m my_project`: roi-lightning's commands with this project's classes, and a line at the end of `fit`."""

import sys

from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from my_project import corpus, unevenness
from roi_lightning.__main__ import main
from roi_lightning.cli.lightning import RoICLI

__all__ = ["Command", "corpus"]  # imported, all classes of this project are known by their short names


class Command(RoICLI):
    """A LightningCLI: options of your own go into `add_arguments_to_parser`."""

    @override
    def run(self) -> None:
        super().run()
        if self.command == "fit":
            learner = self.model  # whichever was chosen
            layers = [unevenness(learner.hard_weight(each), each.dense) for each in learner.tensors.values()]
            rank_zero_info(f"unevenness of the learned mask: {sum(layers) / len(layers):.5f}")


if __name__ == "__main__":
    sys.exit(main(cli=Command))
