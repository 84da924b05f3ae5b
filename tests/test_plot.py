"""``Plot``: formats, files, and what happens without matplotlib."""

import sys
from xml.etree import ElementTree

import pytest

from tests.helpers.assertions import raises
from trt_kvcache.errors import ConfigError
from trt_kvcache.plot import Plot, draw, size_text


def dot():
    return draw(1.0, lambda figure: figure.subplots().plot([0, 1], [0, 1]))


def test_svg_is_a_document_and_the_same_each_time():
    assert ElementTree.fromstring(dot().svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert dot().svg == dot().svg
    assert dot()._repr_svg_() == dot().svg


@pytest.mark.parametrize(("name", "start"), [("a.svg", b"<?xml"), ("a.PNG", b"\x89PNG"), ("a.pdf", b"%PDF")])
def test_the_ending_of_the_name_is_the_format(tmp_path, name, start):
    assert dot().save(tmp_path / name) == tmp_path / name
    assert (tmp_path / name).read_bytes().startswith(start)


def test_another_ending_is_refused_and_nothing_is_written(tmp_path):
    with raises(ConfigError, f"{tmp_path}/a.jpg", expected="file name that ends with .svg, .png, .pdf"):
        dot().save(tmp_path / "a.jpg")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    (tmp_path / "a.svg").write_text("old")

    def fail(self, kind):
        raise OSError("disk full")

    monkeypatch.setattr(Plot, "_render", fail)
    with pytest.raises(OSError, match="disk full"):
        dot().save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text() == "old"


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"^matplotlib is not installed\. Run: pip install 'trt-kvcache\[plot\]'$"):
        dot()


def test_the_settings_of_a_user_are_left_alone():
    from matplotlib import rcParams

    before = dict(rcParams)
    assert dot().svg
    assert dict(rcParams) == before


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5 MiB"), (3 << 30, "3 GiB")])
def test_sizes_as_people_read_them(nbytes, text):
    assert size_text(nbytes) == text
