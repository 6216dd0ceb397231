"""Learning rates against transformers' own schedules."""

import math

import pytest
import torch
from transformers import (
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from roi_lightning.errors import UserError
from roi_lightning.learning.optim import decay_to
from roi_lightning.learning.roi import RoILightningModule

LR = 3e-4


def adamw():
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=LR)


def rates(optimizer, schedule, steps):
    """The rate of every step, and that after the last."""
    found = []
    for _ in range(steps + 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    ("steps", "share"), [(1, 0.0), (1, 0.1), (7, 0.0), (40, 0.1), (45, 0.1), (300, 0.03)]
)
@pytest.mark.parametrize("shape", ["linear", "cosine", "cosine with an end"])
def test_rates_are_those_of_transformers(shape, steps, share):
    ours, theirs, rising = adamw(), adamw(), math.ceil(share * steps)
    if shape == "linear":
        schedule = get_linear_schedule_with_warmup(theirs, rising, steps)
    elif shape == "cosine":
        schedule = get_cosine_schedule_with_warmup(theirs, rising, steps)
    else:
        schedule = get_cosine_with_min_lr_schedule_with_warmup(theirs, rising, steps, min_lr=LR / 8)
    end = LR / 8 if "end" in shape else 0.0
    found = rates(ours, decay_to(ours, end, steps, shape.split()[0], share), steps)
    wanted = rates(theirs, schedule, steps)
    if rising == steps:  # a run that is all warm-up ends at the peak, and nothing comes after
        found, wanted = found[:-1], wanted[:-1]
    assert found == pytest.approx(wanted, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("end", [0.0, 1e-5])
def test_a_line_leads_to_the_end_and_stays_there(end):
    optimizer = adamw()
    found = rates(optimizer, decay_to(optimizer, end, 10, "linear", 0.2), 12)
    assert found[:2] == pytest.approx([0, LR / 2])
    assert found[2:11] == pytest.approx([LR + (end - LR) * i / 8 for i in range(9)])
    assert found[11:] == pytest.approx([end] * 2)


@pytest.mark.parametrize("warmup", [-0.1, 1.0, math.nan])
def test_a_warm_up_that_is_no_share_of_the_run_is_refused(warmup):
    with pytest.raises(UserError, match=rf"model\.lr_warmup is {warmup}; give a share of the run"):
        RoILightningModule("nobody/nothing", lr_warmup=warmup)
