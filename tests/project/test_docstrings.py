"""Docstrings of the package: numpydoc at its border, two lines inside, and no summary that begins with a question word.

The border is what users import and read: the names that ``docs/_ext/public_api.py`` lists, with their public members, and protocols.
The docstrings of commands are their help texts.
"""

import ast
import doctest
import enum
import importlib
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

#: Lines with text in a docstring inside.
MAX_LINES_INSIDE = 2

#: A summary names a thing, or begins with a verb.
QUESTION_WORDS = ("What", "Whatever", "Who", "Whose", "Which", "That", "How", "Where", "When", "Whether")

#: Polygraphy makes the titles of its options from these docstrings, and wants an empty first line.
WRITTEN_FOR_POLYGRAPHY = "polygraphy/command_line_args.py"

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


@cache
def border():
    """Return the public names of the package as ``{(module, qualified name): object}``, with the public members of classes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs" / "_ext"))
        names = importlib.import_module("public_api").public_names()
    found = {}
    for value in (one.value for one in names):
        if inspect.isclass(value) or inspect.isroutine(value):
            found[value.__module__, value.__qualname__] = value
        for base in value.__mro__ if inspect.isclass(value) else ():
            if base.__module__.startswith("trt_kvcache"):
                found |= {(base.__module__, f"{base.__qualname__}.{name}"): member for name, member in public_members(base)}
    return found


@cache
def commands():
    """Return module and name of the functions whose docstrings the command line prints."""
    return {(command.__module__, command.__name__) for command in importlib.import_module("trt_kvcache.cli.app").COMMANDS}


def public_members(cls):
    """Yield the public methods and properties that a class defines itself."""
    for name, member in vars(cls).items():
        is_method = inspect.isfunction(member) or isinstance(member, (classmethod, staticmethod, property))
        if is_method and not name.startswith("_"):
            yield name, member


def protocols(module):
    """Yield the public protocols that a module defines, and their members, with their qualified names."""
    for name, value in vars(module).items():
        is_protocol = inspect.isclass(value) and value.__module__ == module.__name__ and getattr(value, "_is_protocol", False)
        if is_protocol and not name.startswith("_"):
            yield name, value
            yield from ((f"{name}.{member}", attribute) for member, attribute in public_members(value))


def docstrings(source):
    """Yield qualified name, text, line, and whether it is of a protocol, of each docstring of a module; the module's own has no name."""

    def walk(node, qualified, in_protocol):
        text = ast.get_docstring(node) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else None
        if text is not None:
            yield qualified, text, getattr(node, "lineno", 1), in_protocol
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None) if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else None
            inner = qualified if name is None else f"{qualified}.{name}".lstrip(".")
            starts = isinstance(child, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in child.bases)
            yield from walk(child, inner, (starts or in_protocol) and not (name or "").startswith("_"))

    yield from walk(ast.parse(source), "", False)


def too_long_inside(module, source):
    """Return the docstrings of a module that are not at the border and longer than allowed."""
    at_border = {qualified for place, qualified in {*border(), *commands()} if place == module}
    return [
        f"{module}.{name} (line {line}): {count} lines inside; expected at most {MAX_LINES_INSIDE}"
        for name, text, line, in_protocol in docstrings(source)
        if name and not in_protocol and name not in at_border
        if (count := sum(bool(one.strip()) for one in text.splitlines())) > MAX_LINES_INSIDE
    ]


def begins_with_a_question_word(source):
    """Return the docstrings of a module whose summary begins with a question word."""
    return [
        f"line {line}: {text.splitlines()[0]}" for _, text, line, _ in docstrings(source) if text.split()[0].rstrip(",:") in QUESTION_WORDS
    ]


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


@pytest.mark.parametrize("name", module_names())
def test_docstrings_at_the_border_have_the_form_of_numpydoc(name):
    objects = {f"{name}.{qualified}": value for (place, qualified), value in border().items() if place == name}
    objects |= {f"{name}.{qualified}": value for qualified, value in protocols(imported(name))}
    wrong = [f"{place}: {complaint}" for place, value in objects.items() for complaint in complaints(place, value)]
    assert not wrong, "\n".join(wrong)


SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).as_posix() != WRITTEN_FOR_POLYGRAPHY]


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_docstrings_inside_have_two_lines_at_most():
    wrong = [line for path in SOURCES for line in too_long_inside(module_of(path), path.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


def test_no_docstring_begins_with_a_question_word():
    found = {path: begins_with_a_question_word(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}
    wrong = [f"{path.relative_to(ROOT)}, {line}" for path, lines in found.items() for line in lines]
    assert not wrong, "\n".join(wrong)


THREE_LINES = '"""One.\n\n    Two.\n    Three.\n    """'


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"def inner():\n    {THREE_LINES}\n", ["inner"]),
        (f"class Inner:\n    def method(self):\n        {THREE_LINES}\n", ["Inner.method"]),
        (f"def outer():\n    def _nested():\n        {THREE_LINES}\n", ["outer._nested"]),
        (f"class Engine(Protocol):\n    {THREE_LINES}\n    def run(self):\n        {THREE_LINES}\n", []),
        (f"class Engine(Protocol):\n    def _run(self):\n        {THREE_LINES}\n", ["Engine._run"]),
        ('def inner():\n    """One.\n\n    Two.\n    """\n', []),
        (f"{THREE_LINES}\n", []),
    ],
)
def test_a_long_docstring_inside_is_found(source, found):
    assert [line.split()[0] for line in too_long_inside("trt_kvcache.sample", source)] == [f"trt_kvcache.sample.{name}" for name in found]


def test_a_long_docstring_of_an_exported_name_is_none():
    source = f"class KVCacheConfig:\n    {THREE_LINES}\n    def _inner(self):\n        {THREE_LINES}\n"
    (found,) = too_long_inside("trt_kvcache.cache.config", source)
    assert "KVCacheConfig._inner" in found


@pytest.mark.parametrize("summary", ["What it does.", "Whose it is.", "Which one.", "That of a slot.", "How many."])
def test_a_summary_that_begins_with_a_question_word_is_found(summary):
    assert begins_with_a_question_word(f'def f():\n    """{summary}"""\n') == [f"line 1: {summary}"]
    assert begins_with_a_question_word(f'"""{summary}"""\n') == [f"line 1: {summary}"]
    assert begins_with_a_question_word(f'def f():\n    """Number of slots. {summary}"""\n') == []


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
