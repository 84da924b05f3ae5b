"""The API reference: one page for each public name, written from the lists of names of the package.

Public is what ``trt_kvcache.__all__`` names, and what the ``__all__`` of a subpackage (``trt_kvcache.kernels``) names besides. The
subpackage in which a name is defined decides on which page of ``docs/reference`` it is listed (:data:`AREAS`), so a new public name
has its entry without anybody writing one, and a new subpackage without a page fails the build.

``{public-names}`` in a page makes the table of an area and links the pages, which ``write_pages`` writes into
``docs/reference/generated`` before Sphinx reads its sources. ``resolve`` lets docstrings name things as code does: by a bare name
(``KVCacheManager``) or by the module of the definition.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

import trt_kvcache

#: Pages of ``docs/reference``, each with the subpackages and modules of ``trt_kvcache`` whose public names it lists.
AREAS = {
    "cache": ("cache", "plot"),
    "memory": ("memory", "dtypes"),
    "sequences": ("sequences", "handles"),
    "sessions": ("session",),
    "generation": ("generation",),
    "engines": ("engine", "engine_folder", "trt", "builder", "reference"),
    "operations": ("ops",),
    "kernels": ("kernels",),
    "checkpoints": ("checkpoint", "model"),
    "polygraphy": ("polygraphy",),
    "benchmarking": ("benchmarking",),
    "serving": ("server",),
    "errors": ("errors",),
}

#: Subpackages without public names: the command line has a page of its own, the rest is internal.
INTERNAL = {"_util", "cli", "doctor", "torch_engine"}

#: Classes that are not exported and yet have a page, because docstrings send readers there: what managers, memories and builds share.
DESCRIBED = {
    "Cache": "trt_kvcache.cache.cache",
    "Allocation": "trt_kvcache.memory.base",
    "BuildOptions": "trt_kvcache.builder.options",
}

#: Names of other projects in references: shown as text, since nothing is fetched while the site is built.
ELSEWHERE = {
    "collections",
    "cuda",
    "ml_dtypes",
    "np",
    "numpy",
    "os",
    "pathlib",
    "polygraphy",
    "tensorrt",
    "tensorrt_rtx",
    "torch",
    "typing",
}

#: Base classes whose members are not repeated on the page of a public class.
_FOREIGN_BASES = "object, tuple, dict, str, int, Enum, Exception, BaseException, UserWarning, Protocol, Generic"


@dataclass(frozen=True)
class PublicName:
    """One public name: where it is imported from, and what it is."""

    module: str
    name: str
    room: str
    value: Any
    exported: bool = True

    @property
    def full(self) -> str:
        """The name as users import it."""
        return f"{self.module}.{self.name}"

    @property
    def page(self) -> str:
        """Its page, seen from ``docs/reference``."""
        return f"generated/{self.full}"

    @property
    def summary(self) -> str:
        """The first line of its docstring; of a constant or type alias, what it is."""
        if inspect.isroutine(self.value) or inspect.isclass(self.value):
            return (inspect.getdoc(self.value) or "").partition("\n")[0]
        return f"``{self.value!r}``".replace("typing.", "")


def rooms() -> list[str]:
    """Return the subpackages and modules directly in ``trt_kvcache``."""
    root = Path(trt_kvcache.__file__).parent
    there = (path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    return sorted(name for name in there if name not in {"__init__", "__main__", "_version"})


@cache
def public_names() -> tuple[PublicName, ...]:
    """Return every name that has a page, those of ``trt_kvcache`` itself first; a name that is in two lists is documented once."""
    found: dict[str, PublicName] = {}
    for name in trt_kvcache.__all__:
        if not name.startswith("__"):
            room = trt_kvcache._MODULE_OF[name].partition(".")[0]
            found[name] = PublicName("trt_kvcache", name, room, getattr(trt_kvcache, name))
    for room in rooms():
        if room in INTERNAL:
            continue
        module = import_module(f"trt_kvcache.{room}")
        for name in getattr(module, "__all__", ()):
            if name not in found:
                found[name] = PublicName(module.__name__, name, room, getattr(module, name))
    for name, module in DESCRIBED.items():
        if name not in found:
            found[name] = PublicName(module, name, module.split(".")[1], getattr(import_module(module), name), exported=False)
    return tuple(found.values())


def names_of(area: str) -> list[PublicName]:
    """Return the names that a page of ``docs/reference`` lists: classes, functions, the rest, what is not exported; each by name."""

    def order(one: PublicName) -> tuple[bool, int, str]:
        return (not one.exported, 0 if inspect.isclass(one.value) else 1 if inspect.isroutine(one.value) else 2, one.name.lower())

    return sorted((one for one in public_names() if one.room in AREAS[area]), key=order)


def missing_areas() -> list[str]:
    """Return the subpackages that are neither on a page nor internal."""
    listed = {room for names in AREAS.values() for room in names}
    return [room for room in rooms() if room not in listed | INTERNAL]


def shown_signature(function: Any) -> str:
    """Return the signature of a function that shows other parameters than its source has; autodoc finds the others."""
    shown: inspect.Signature | None = vars(function).get("__signature__")
    if shown is None:
        return ""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in shown.parameters.values()]
    return str(shown.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def page_text(one: PublicName) -> str:
    """Return the page of one name, in reStructuredText."""
    lines = [one.name, "=" * len(one.name), "", f".. currentmodule:: {one.module}", ""]
    if inspect.isclass(one.value):
        lines += [f".. autoclass:: {one.name}", "   :members:", f"   :inherited-members: {_FOREIGN_BASES}"]
        if issubclass(one.value, enum.Enum):
            lines.append("   :undoc-members:")
        if issubclass(one.value, Exception):
            lines.append("   :show-inheritance:")
    elif inspect.isroutine(one.value):
        lines.append(f".. autofunction:: {one.name}{shown_signature(one.value)}")
    else:
        lines.append(f".. autodata:: {one.name}")
    return "\n".join([*lines, ""])


def write_pages(app: Sphinx) -> None:
    """Write a page for each public name; pages of names that are gone are removed."""
    if missing := missing_areas():
        raise ExtensionError(f"docs/_ext/public_api.py: no page of the reference lists {', '.join(missing)}. Add them to AREAS.")
    folder = Path(app.srcdir) / "reference" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {folder / f"{one.full}.rst": page_text(one) for one in public_names()}
    for stale in set(folder.glob("*.rst")) - set(wanted):
        stale.unlink()
    for path, text in wanted.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _summary_cell(one: PublicName) -> str:
    """Return the summary of a name as Markdown, with literals in place of roles."""
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"`\1`", one.summary)
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text).replace("``", "`")
    return f"{'' if one.exported else '*Not exported.* '}{text}"


def outdated_pages(app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Have the pages with tables read again in each build: what they list comes from the package, not from their text."""
    return [f"reference/{area}" for area in AREAS]


class PublicNames(SphinxDirective):
    """``{public-names} AREA``: a table of the public names of an area, and their pages in the table of contents."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the table, and a toctree that is not shown."""
        area = self.arguments[0]
        if area not in AREAS:
            raise self.error(f"public-names: expected one of {', '.join(AREAS)}, got {area}")
        names = names_of(area)
        if not names:
            return []
        rows = [f"* - {{py:obj}}`~{one.full}`\n  - {_summary_cell(one)}" for one in names]
        pages = [f"{one.name} <{one.page}>" for one in names]
        text = ["```{list-table}", ":widths: 35 65", "", *rows, "```", "", "```{toctree}", ":hidden:", "", *pages, "```", ""]
        return self.parse_text_to_nodes("\n".join(text))


def _documented_names(target: str) -> Iterator[str]:
    """Yield the documented names that a dotted reference may mean: its public part, with what stands behind it.

    A field of a dataclass or named tuple is described with its class, so the class is what its name leads to.
    """
    parts = target.split(".")
    known = {one.name: one for one in public_names()}
    for index, part in enumerate(parts):
        if part not in known:
            continue
        member = parts[index + 1 :]
        yield ".".join([known[part].full, *member])
        fields = (*getattr(known[part].value, "__dataclass_fields__", ()), *getattr(known[part].value, "_fields", ()))
        if len(member) == 1 and member[0] in fields:
            yield known[part].full


def _area_of(module: str) -> str | None:
    """Return the page that lists the names of ``trt_kvcache.ROOM`` and the modules in it, or None for another module."""
    parts = module.split(".")
    areas = {room: area for area, names in AREAS.items() for room in names}
    return areas.get(parts[1]) if parts[0] == "trt_kvcache" and len(parts) > 1 else None


def resolve(app: Sphinx, env: BuildEnvironment, node: Any, contnode: nodes.Node) -> nodes.Node | None:
    """Resolve a reference to a name of the package by where it is documented; names of other projects become text."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"].removeprefix("~")
    domain = env.get_domain("py")
    if node["reftype"] == "mod" and (area := _area_of(target)):
        return make_refnode(app.builder, node["refdoc"], f"reference/{area}", "", contnode)
    for name in _documented_names(target):
        found = domain.resolve_xref(env, node["refdoc"], app.builder, "obj", name, node, contnode)
        if found is not None:
            return found
    first = target.partition(".")[0]
    return contnode if first in ELSEWHERE or hasattr(builtins, first) else None


def _is_cpp(literal: nodes.literal) -> bool:
    """Tell whether a literal stands in the first column of a table whose heading begins with C++: it names something else."""
    entry = literal.parent
    while entry is not None and not isinstance(entry, nodes.entry):
        entry = entry.parent
    if entry is None or entry.parent.index(entry) > 0:
        return False
    heading = next(iter(entry.parent.parent.parent.findall(nodes.thead)), None)
    return heading is not None and heading.astext().startswith("C++")


class LinkNames(SphinxTransform):
    """Turn ``KVCacheManager`` and ``KVCacheManager.compact_batch`` in pages into links, so that pages are plain Markdown elsewhere.

    Only public names and what stands behind their first dot are linked; a member that does not exist fails the build as any
    other broken reference does.
    """

    default_priority = 500

    def apply(self, **kwargs: Any) -> None:
        """Link the literals of one page."""
        if self.env.docname.startswith("reference/generated/"):
            return  # docstrings say what they refer to
        known = {one.name for one in public_names()}
        for literal in list(self.document.findall(nodes.literal)):
            target = literal.astext().removesuffix("()")
            is_name = re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", target) and target.partition(".")[0] in known
            elsewhere = isinstance(literal.parent, nodes.title | nodes.reference | addnodes.pending_xref) or target.endswith((".py", ".cu"))
            if is_name and not elsewhere and not _is_cpp(literal):
                options = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refdoc": self.env.docname, "refwarn": True}
                reference = addnodes.pending_xref("", **options)
                reference.source, reference.line = literal.source, literal.line
                literal.replace_self(reference)
                reference += literal


def check_entries(app: Sphinx, env: BuildEnvironment) -> list[str]:
    """Fail where a public name has no entry in the reference."""
    documented = env.get_domain("py").objects
    missing = [one.full for one in public_names() if one.full not in documented]
    if missing:
        raise ExtensionError(f"the reference has no entry for {', '.join(missing)}.")
    return []


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it to Sphinx."""
    app.add_directive("public-names", PublicNames)
    app.add_transform(LinkNames)
    app.connect("builder-inited", write_pages)
    app.connect("env-get-outdated", outdated_pages)
    app.connect("missing-reference", resolve)
    app.connect("env-updated", check_entries)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
