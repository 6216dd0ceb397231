"""A command line of your own.

python own_cli.py fit --model.lm my_model_dir --data.corpora 'my_texts/*.txt' --data.seq_len 64 --trainer.max_steps 20
"""

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from roi_lightning import CalibrationDataModule, RoILightningModule


class OwnCLI(LightningCLI):
    """Options of the learner, the text and the Trainer; the tokenizer is the model's."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link what is the same."""
        parser.link_arguments("model.lm", "data.tokenizer")


if __name__ == "__main__":
    OwnCLI(RoILightningModule, CalibrationDataModule, auto_configure_optimizers=False)
