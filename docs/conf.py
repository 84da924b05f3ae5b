"""Sphinx configuration of the documentation: `make docs` builds it, strictly and without network access."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]  # the package of this checkout, and the extension that writes the API pages

from numpydoc import xref  # noqa: E402
from public_api import public_names  # noqa: E402

from trt_kvcache import __version__  # noqa: E402

project = "trt_kvcache"
author = "the trt_kvcache contributors"
project_copyright = f"2026, {author}. Apache-2.0"
release = version = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_copybutton",
    "sphinx_design",
    "public_api",
]
exclude_patterns = ["_ext"]
suppress_warnings: list[str] = []

# Pages.
myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4

# The API reference. numpydoc sections carry the types, so signatures leave them out.
autodoc_mock_imports = ["cuda", "tensorrt", "tensorrt_rtx"]
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True
add_module_names = False
numpydoc_show_class_members = False
# Public names in the types of parameters are links, all other words are text (numpydoc's own links lead to the Python manual).
numpydoc_xref_param_type = True
numpydoc_xref_ignore = "all"
numpydoc_xref_aliases = {one.name: one.full for one in public_names()}
xref.DEFAULT_LINKS.clear()
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

# Strict: with -n, every reference has to lead somewhere. `public_api` resolves references to names of the package by where they are
# documented, and lets names of other projects (numpy, cuda, ...) be text, because the site is built without network access.
nitpicky = True
nitpick_ignore: list[tuple[str, str]] = []

html_theme = "furo"
html_title = f"trt_kvcache {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
