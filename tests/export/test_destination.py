import pytest

from helpers.directories import export_of
from helpers.tiny_models import random_masks, tiny_qwen2
from roi_lightning.errors import UserError
from roi_lightning.export import check_destination, write_export
from roi_lightning.masks.mask_set import MaskSet


def test_foreign_indices_are_refused(tmp_path):
    check_destination(tmp_path / "absent" / "deep")
    (tmp_path / "empty").mkdir()
    check_destination(tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("x")
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "roi_sparsity.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "thesis", "fake", "link"):
        with pytest.raises(UserError, match=name):
            check_destination(tmp_path / name)
    with pytest.raises(UserError, match="no folder"):
        check_destination(tmp_path / "file" / "out")


def test_an_earlier_export_is_replaced_when_asked_and_a_stranger_s_file_in_it_saved(tmp_path):
    source, masks, out = export_of(tiny_qwen2(tmp_path / "base"))
    other = random_masks(source, "1:4")
    with pytest.raises(UserError, match="earlier export; pass --overwrite"):
        write_export(source, other, out)
    assert MaskSet.load(out).pattern == masks.pattern
    write_export(source, other, out, overwrite=True)
    assert MaskSet.load(out).pattern == other.pattern
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"notes\.txt"):
        write_export(source, masks, out, overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"


def test_a_runs_own_earlier_export_is_replaced(tmp_path):
    source, _, out = export_of(tiny_qwen2(tmp_path / "base"), training={"fingerprint": "a"})
    for run in (None, "b"):
        with pytest.raises(UserError, match="earlier export"):
            write_export(source, random_masks(source, "1:4"), out, run=run)
    write_export(source, random_masks(source, "1:4"), out, run="a")
    assert str(MaskSet.load(out).pattern) == "1:4"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")], ids=repr)
@pytest.mark.parametrize("step", ["model_card", "write_sidecar", "check_masks_fit"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, error, step):
    source, _, out = export_of(tiny_qwen2(tmp_path / "base"))
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*args):
        raise error

    monkeypatch.setattr(f"roi_lightning.export.write.{step}", fail)
    # What is no error in writing is somebody else's to tell.
    written = isinstance(error, OSError) and step != "check_masks_fit"
    with pytest.raises(UserError if written else type(error)):
        write_export(source, random_masks(source, "1:4"), out, overwrite=True)
    assert before == {path.name: path.read_bytes() for path in out.iterdir()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_an_export_that_does_not_verify_is_not_kept(tmp_path, monkeypatch):
    base = tiny_qwen2(tmp_path / "base")
    monkeypatch.setattr("roi_lightning.export.write.overwrite_tensors", lambda path, tensors: None)
    with pytest.raises(UserError, match=r"does not verify.*zeros"):
        export_of(base)
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_failed_rename_puts_the_old_export_back(tmp_path, monkeypatch):
    source, _, out = export_of(tiny_qwen2(tmp_path / "base"))
    before = (out / "roi_sparsity.json").read_bytes()
    rename = type(out).rename

    def sometimes(self, target):
        if ".partial-" in self.name:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(type(out), "rename", sometimes)
    with pytest.raises(UserError, match="Input/output error"):
        write_export(source, random_masks(source, "1:4"), out, overwrite=True)
    assert (out / "roi_sparsity.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]
