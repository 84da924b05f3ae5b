"""Facts that several pages state: they agree with docs/facts.py, and docs/facts.py agrees with the code and the results."""

import importlib
import json
import re
import subprocess
import sys

import pytest

from tests.paths import ROOT

MARK = re.compile(r"<!-- fact: [\w ]+ -->.*?<!-- end of fact -->", re.DOTALL)


@pytest.fixture(scope="module")
def facts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        yield importlib.import_module("facts")


def pages(facts):
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in facts.PAGES}


def test_the_pages_state_the_facts_of_the_script():
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "facts.py"), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_page_that_states_something_else_is_found(facts):
    page = "It was run: <!-- fact: status -->everywhere,\nof course<!-- end of fact -->.\n<!-- extras -->\nstale\n<!-- end of extras -->\n"
    assert facts.with_facts(page) == facts.with_facts(facts.with_facts(page)) != page
    assert "everywhere" not in facts.with_facts(page)
    assert "stale" not in facts.with_facts(page)


@pytest.mark.parametrize("page", ["README.md", "docs/gpu.md", "docs/index.md", "docs/engines.md"])
def test_the_pages_that_say_what_was_run_say_it_in_the_same_words(facts, page):
    assert facts.FACTS["status"] in pages(facts)[page]


def test_every_fact_is_on_a_page(facts):
    named = {name for page in pages(facts).values() for name in re.findall(r"<!-- fact: ([\w ]+) -->", page)}
    assert named == set(facts.FACTS)


def test_no_page_lists_compute_capabilities_in_words_of_its_own(facts):
    for name, page in pages(facts).items():
        assert re.findall(r"8\.0,? (?:8\.6|or 8\.6).*", MARK.sub("", page)) in ([], ['8.0 8.6 8.9 12.0 12.1 >12.0" |']), name


def test_the_gpus_of_the_status_are_those_of_the_results(facts):
    results = [ROOT / "benchmarks" / "results" / name for name in ("end_to_end.json", "end_to_end_llama.json")]
    devices = {json.loads(path.read_text(encoding="utf-8"))["device"] for path in results}
    gpus = " and ".join(f"an {device.split()[1]}" for device in sorted(devices))  # "NVIDIA H100 80GB HBM3"
    assert facts.FACTS["status"].endswith(f"measured on {gpus}.")
    assert facts.FACTS["torch on a GPU"] == f"yes: {gpus}"


def test_the_bindings_of_full_tensorrt_are_those_of_the_test(facts):
    versions = importlib.import_module("tests.bindings.versions").VERSIONS
    first, last = (".".join(version.split(".")[:2]) for version in (versions[0], versions[-1]))
    assert f"bindings of {first} to {last}" in facts.FACTS["full TensorRT"]


@pytest.mark.trt
def test_tensorrt_for_rtx_builds_for_the_compute_capabilities_that_the_pages_list(facts):
    from trt_kvcache.builder.resolved_options import known_compute_capabilities
    from trt_kvcache.trt.module import load

    listed = re.findall(r"\d+\.\d", facts.FACTS["rtx capabilities"])
    known = [*known_compute_capabilities(load("tensorrt_rtx"))]
    assert set(listed) <= set(known)
    assert [one for one in known if one not in listed and float(one) < 12] == []


def test_every_extra_has_a_line_and_another_one_is_an_error(facts, monkeypatch):
    assert [line.split("`")[1] for line in facts.extras_table().splitlines()[3:]] == [*facts.EXTRAS]
    monkeypatch.delitem(facts.EXTRAS, "ray")
    with pytest.raises(ValueError, match=r"expected the extras of pyproject\.toml, got others: \['ray'\]"):
        facts.extras_table()


def test_the_pages_install_only_extras_that_exist(facts):
    for name, page in pages(facts).items():
        for listed in re.findall(r"(?:\.|trt-kvcache)\[([a-z0-9,-]+)\]", page):
            assert set(listed.split(",")) <= set(facts.extras()), name


def test_the_machine_that_compares_installs_polygraphy(facts):
    (row,) = (line for line in pages(facts)["docs/install.md"].splitlines() if "to try it, compare" in line)
    assert '".[models,polygraphy]"' in row
