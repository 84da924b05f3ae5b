"""Write the table of model families into README.md and docs/models.md, from the code: ``python docs/models_table.py``.

``--check`` writes nothing; exit code 1 says that a table is not that of the code. What a family needs is what its golden models need. What
an engine computes is what its ``COMPUTED_FEATURES`` names.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from table_pages import write_tables  # noqa: E402

from trt_kvcache.model import ModelConfig  # noqa: E402
from trt_kvcache.model.families.registry import FAMILIES  # noqa: E402
from trt_kvcache.model.features import FEATURES, features  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "docs" / "models.md")
BEGIN, END = "<!-- models: docs/models_table.py -->", "<!-- end of models -->"

#: Where each engine says what it computes, beside the one in NumPy, which computes everything. They are not imported: one needs torch.
ENGINES = {"PyTorch": "trt_kvcache/torch_engine/engine.py", "TensorRT": "trt_kvcache/builder/options.py"}


def table() -> str:
    """Return the table, one line a family."""
    computed = {engine: computed_features(ROOT / path) for engine, path in ENGINES.items()}
    lines = [f"| family | `model_type` | beside what Llama has | {' | '.join(('NumPy', *computed))} |", "|---|---|---|---|---|---|"]
    for family in FAMILIES.values():
        needs = [features(model) for model in golden_models(family.name)]
        names = [text for name, text in FEATURES.items() if any(name in need for need in needs)]
        verdicts = ["yes", *(verdict([need.keys() <= found for need in needs]) for found in computed.values())]
        lines.append(f"| {family.title} | `{family.name}` | {', '.join(names)} | {' | '.join(verdicts)} |")
    return "\n".join(lines)


def verdict(models: list[bool]) -> str:
    """Return whether an engine computes the golden models of a family: some need more than others."""
    return "yes" if all(models) else "some" if any(models) else "no"


def golden_models(family: str) -> list[ModelConfig]:
    """Return the golden models of a family."""
    paths = sorted((ROOT / "tests" / "golden").glob("*/config.json"))
    models = [ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return [model for model in models if model.family == family]


def computed_features(path: Path) -> frozenset[str]:
    """Return the names in the ``COMPUTED_FEATURES`` of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "COMPUTED_FEATURES" for target in targets):
            return frozenset(item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str))
    raise ValueError(f"{path}: expected COMPUTED_FEATURES, got none.")


if __name__ == "__main__":
    raise SystemExit(write_tables(PAGES, BEGIN, END, table(), name="models", script="docs/models_table.py"))
