"""Docstrings of the package: their examples run, and all have the form of numpydoc."""

import doctest
import enum
import inspect
import re
import warnings
from functools import cache

import pytest
from numpydoc.docscrape import NumpyDocString
from numpydoc.validate import validate

import trt_kvcache
from tests.paths import ROOT
from tests.project.optional_modules import imported

PACKAGE = ROOT / "trt_kvcache"

#: The forms of each kernel: :mod:`trt_kvcache.kernels.backend` describes what both do.
KERNEL_FORMS = ("trt_kvcache.kernels.cuda", "trt_kvcache.kernels.host")

#: What numpydoc checks in every docstring (``numpydoc.validate.ERROR_MSGS`` describes each code). Not checked is what a short
#: docstring may do without: an extended summary, See Also, examples, and a Returns section if the summary says it all. A parameter or
#: a return value that has an entry has a description too: a name and a type never say it all.
FORM = {
    *("GL01", "GL02", "GL03", "GL05", "GL06", "GL07", "GL08", "GL09", "GL10"),  # there is a docstring, and its sections parse
    *("SS01", "SS02", "SS03", "SS04", "SS06"),  # the summary is one sentence in one line
    *("PR02", "PR04", "PR05", "PR07", "PR10"),  # each documented parameter exists and has a type and a description
    "RT03",  # each documented return value has a description; see also undescribed_results
}

#: Every parameter is documented. Checked in docstrings with a Parameters section, and for the names that ``trt_kvcache`` exports.
ALL_PARAMETERS = "PR01"

LIST_OF_NAMES = re.compile(r"^``[\w*]+``(, ``[\w*]+``)*: ", re.MULTILINE)
RAISES_IN_PROSE = re.compile(r"\bRaises (?:an? )?(?::class:)?`*[A-Z]\w*(?:Error|Exception|Unknown)\b")


def module_names(text=""):
    """Return the modules of the package whose source contains ``text``."""
    files = sorted(path for path in PACKAGE.rglob("*.py") if path.stem != "__main__" and text in path.read_text(encoding="utf-8"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files]


def is_public(name):
    return not any(part.startswith("_") for part in name.split(".")) and not name.startswith(KERNEL_FORMS)


def public_objects(module):
    """Return the public classes and functions that a module defines, and the public methods and properties of the classes."""
    found = {}
    for name, value in vars(module).items():
        is_ours = getattr(value, "__module__", None) == module.__name__
        if name.startswith("_") or not is_ours or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        found[f"{module.__name__}.{name}"] = value
        for member, attribute in vars(value).items() if inspect.isclass(value) else ():
            is_method = inspect.isfunction(attribute) or isinstance(attribute, (classmethod, staticmethod, property))
            if is_method and not member.startswith("_"):
                found[f"{module.__name__}.{name}.{member}"] = attribute
    return found


@cache
def exported_values():
    return [getattr(trt_kvcache, name) for name in trt_kvcache.__all__]


def has_no_constructor(value):
    """Whether the signature of a class is not its own: that of an enumeration is ``Enum``'s, that of a protocol is empty."""
    return inspect.isclass(value) and (issubclass(value, enum.Enum) or getattr(value, "_is_protocol", False))


def undescribed_results(value, docstring):
    """Return the types that have no description in the sections that RT03 is not about: Yields, and Returns of a class method."""
    sections = ("Yields",) if inspect.isfunction(value) else ("Returns", "Yields")
    parsed = NumpyDocString(docstring)
    return [f"{section}: {result.type or result.name}" for section in sections for result in parsed[section] if not result.desc]


def complaints(name, value):
    """Return what is wrong with the docstring of a class, function, method or property."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an unknown section, which is among the errors too
        checked = validate(name)
        docstring = checked["docstring"] or ""
        undescribed = undescribed_results(value, docstring)
    is_complete = "\nParameters\n---" in docstring or any(value is exported for exported in exported_values())
    codes = FORM | {ALL_PARAMETERS} if is_complete and not has_no_constructor(value) else FORM
    return [
        *(f"{code}: {text}" for code, text in checked["errors"] if code in codes),
        *(f"a result without a description in {result}" for result in undescribed),
        *(f"a list of names where a section is expected: {match.group().strip()}" for match in LIST_OF_NAMES.finditer(docstring)),
        *(f"prose where a Raises section is expected: {match.group()}" for match in RAISES_IN_PROSE.finditer(docstring)),
    ]


@pytest.mark.parametrize("name", module_names(">>> "))
def test_examples_run(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = doctest.testmod(imported(name), verbose=False)
    assert result.attempted > 0
    assert result.failed == 0, "see the captured output"


@pytest.mark.parametrize("name", [name for name in module_names() if is_public(name)])
def test_docstrings_have_the_form_of_numpydoc(name):
    objects = public_objects(imported(name))
    wrong = [f"{place}: {complaint}" for place, value in objects.items() for complaint in complaints(place, value)]
    assert not wrong, "\n".join(wrong)


def documented(docstring):
    """Define a function in this module that has a docstring, as ``validate`` finds objects by their name."""

    def sample(first, second):
        return first, second

    sample.__doc__ = docstring
    globals()["sample"] = sample
    return complaints(f"{__name__}.sample", sample)


GOOD = """Return both.

    Parameters
    ----------
    first : int
        One.
    second : int
        The other.

    Returns
    -------
    tuple of int
        In this order.

    Raises
    ------
    ConfigError
        Never.
    """


def test_a_docstring_of_the_form_passes():
    assert documented(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("first : int", "third : int", "PR02"),
        ("    second : int\n        The other.\n", "", "PR01"),
        ("first : int", "first", "PR04"),
        ("first : int", "first: int", "PR10"),
        ("    first : int\n        One.\n", "    first : int\n", "PR07"),
        ("    tuple of int\n        In this order.\n", "    tuple of int\n", "RT03"),
        (
            "Returns\n    -------\n    tuple of int\n        In this order.\n",
            "Yields\n    ------\n    int\n",
            "a result without a description",
        ),
        ("Parameters\n    ----------", "Arguments\n    ---------", "GL06"),
        ("Raises\n    ------\n    ConfigError\n        Never.", "Raises ConfigError: never.", "prose where a Raises section"),
        ("Return both.", "Return both. Raises :class:`ConfigError` if it cannot.", "prose where a Raises section"),
        ("Return both.\n", "Return both.\n\n    ``first``, ``second``: Numbers.\n", "a list of names"),
        (GOOD, "", "GL08"),
    ],
)
def test_a_docstring_of_another_form_is_found(old, new, complaint):
    assert any(found.startswith(complaint) for found in documented(GOOD.replace(old, new)))


def test_the_result_of_a_class_method_needs_a_description_too():
    docstring = "Open it.\n\nReturns\n-------\nint\n"
    assert undescribed_results(classmethod(documented), docstring) == ["Returns: int"]
    assert undescribed_results(classmethod(documented), f"{docstring}    Open.\n") == []
