"""The record of a run: what was appended comes back, whatever happened in between."""

import json
import math

import pytest

from roi_lightning.errors import UserError
from roi_lightning.reports import RECORD, append, read_record


def start(folder, step, resumed_from=None):
    append(folder / RECORD, "start", {"step": step, "resumed_from": resumed_from, "max_steps": 9})


def measure(folder, step, **values):
    append(folder / RECORD, "metrics", {"step": step, "time": 0.5, "values": values})


def end(folder, step, status="finished", message=None):
    append(folder / RECORD, "end", {"step": step, "status": status, "message": message, "seconds": 1.0})


def test_a_run_that_was_killed_and_interrupted(tmp_path):
    start(tmp_path, 0)
    for step in range(1, 6):
        measure(tmp_path, step, loss=10.0 + step)
    measure(tmp_path, 4, lr=0.5)
    with (tmp_path / RECORD).open("a") as file:
        file.write('{"kind": "metrics", "ste')  # killed here
    start(tmp_path, 3, "checkpoints/step=3.ckpt")
    measure(tmp_path, 3, flips=0.0)
    measure(tmp_path, 4, loss=20.0)
    end(tmp_path, 4, "interrupted")
    start(tmp_path, 4, "checkpoints/step=4.ckpt")
    measure(tmp_path, 5, loss=30.0)
    end(tmp_path, 5)
    record = read_record(tmp_path)
    assert [(leg.start["step"], leg.status) for leg in record.legs] == [
        (0, "killed"),
        (3, "interrupted"),
        (4, "finished"),
    ]
    assert record.curves == {
        "loss": [(1, 11.0), (2, 12.0), (3, 13.0), (4, 20.0), (5, 30.0)],
        "flips": [(3, 0.0)],
    }


def test_a_run_that_begins_anew_continues_nothing(tmp_path):
    start(tmp_path, 0)
    measure(tmp_path, 0, flips=0.25)
    measure(tmp_path, 1, loss=1.0)
    start(tmp_path, 0)
    measure(tmp_path, 1, loss=2.0)
    assert read_record(tmp_path).curves == {"loss": [(1, 2.0)]}


def test_the_last_end_of_a_leg_counts(tmp_path):
    start(tmp_path, 0)
    end(tmp_path, 9)
    end(tmp_path, 9, "failed", "no space")
    (leg,) = read_record(tmp_path).legs
    assert (leg.status, leg.end["message"]) == ("failed", "no space")


def test_numbers_that_are_not_finite(tmp_path):
    start(tmp_path, 0)
    measure(tmp_path, 1, loss=math.nan, up=math.inf, down=-math.inf)
    stored = json.loads((tmp_path / RECORD).read_text().splitlines()[1])
    assert stored["values"] == {"loss": "nan", "up": "inf", "down": "-inf"}
    curves = read_record(tmp_path).curves
    assert math.isnan(curves["loss"][0][1])
    assert (curves["up"], curves["down"]) == ([(1, math.inf)], [(1, -math.inf)])


BAD = {
    "nothing": None,
    "empty": "",
    "no start": '{"kind": "end"}\n',
    "damaged in the middle": '{"kind": "start", "step": 0, "resumed_from": null}\n{"kin\n{"kind": "end"}\n',
    "of another kind": '{"kind": "start", "step": 0, "resumed_from": null}\n[]\n{"kind": "end"}\n',
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_what_is_no_record_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / RECORD).write_text(text)
    with pytest.raises(UserError, match=RECORD):
        read_record(tmp_path)


def test_a_record_that_can_not_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="can't be written"):
        start(tmp_path / "file", 0)
