"""A mask and an export by Lightning's own Trainer.

python plain_trainer.py
"""

from lightning.pytorch import Trainer

from roi_lightning import CalibrationDataModule, RoILightningModule
from roi_lightning.learning.callbacks import HardenMasks, SparseExport

module = RoILightningModule("my_model_dir", sampler="StraightThrough", prior="activation", tau=0.1, lam=0.005)
data = CalibrationDataModule("my_model_dir", corpora="my_texts/*.txt", seq_len=128, windows_per_step=4)
trainer = Trainer(max_steps=10, default_root_dir="runs/plain", callbacks=[HardenMasks(), SparseExport()])
trainer.fit(module, data)
