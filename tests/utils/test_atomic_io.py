"""What killed processes leave beside their files is cleared, and nothing else is."""

import os
import signal
import subprocess
import sys

import pytest

from roi_lightning.utils.atomic_io import clear_abandoned, temporary_name, written_aside

WRITE = """
import sys, time
from pathlib import Path
from roi_lightning.utils.atomic_io import written_aside
with written_aside(Path("{name}")) as partial:
    if {folder}:
        partial.mkdir()
        partial /= "inside"
    partial.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


def killed(folder, name, is_folder=False):
    """A process that is killed while it writes; what it leaves."""
    code = WRITE.format(name=name, folder=is_folder)
    process = subprocess.Popen([sys.executable, "-c", code], cwd=folder, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"writing\n"
    alive = [path for path in folder.iterdir() if path.name.startswith(".")]
    clear_abandoned(folder)
    assert alive
    assert all(path.exists() for path in alive), "it still writes"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return alive


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_next_one_to_write_clears_up(tmp_path, is_folder):
    left = killed(tmp_path, "a", is_folder)
    assert all(path.exists() for path in left)
    with written_aside(tmp_path / "b") as partial:
        partial.write_text("whole")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def dead(path, purpose):
    """The name that a process which is gone would have given."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    return path.with_name(temporary_name(path, purpose).replace(f"-{os.getpid()}-", f"-{gone.pid}-") + "abc")


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_cut_off_while_it_was_replaced_has_its_name_again(tmp_path, replaced):
    old = dead(tmp_path / "export", "old")
    old.mkdir()
    (old / "file").write_text("old")
    if replaced:
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "file").write_text("new")
    clear_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "file").read_text() == ("new" if replaced else "old")


def test_other_machines_have_a_day(tmp_path):
    name = temporary_name(tmp_path / "a")
    fresh, stale = (tmp_path / (name.replace("partial-", "partial-elsewhere_") + end) for end in ("1", "2"))
    for path in (fresh, stale):
        path.write_text("half")
    os.utime(stale, (0, 0))
    clear_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [fresh]
