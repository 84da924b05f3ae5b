"""Write the tables of models into README.md and docs/models.md, from the code: ``python docs/models_table.py``.

``--check`` writes nothing; exit code 1 means that a table differs from the code. Checkpoints and reasons come from the configurations in
``tests/model/published``. The features of a family come from its golden and published models, those of an engine from its
``COMPUTED_FEATURES``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from table_pages import write_tables  # noqa: E402

from trt_kvcache.errors import ConfigError  # noqa: E402
from trt_kvcache.model import AttentionConfig, ModelConfig  # noqa: E402
from trt_kvcache.model.families.registry import FAMILIES  # noqa: E402
from trt_kvcache.model.features import FEATURES, features  # noqa: E402

README, MODELS = ROOT / "README.md", ROOT / "docs" / "models.md"
PUBLISHED = ROOT / "tests" / "model" / "published"

#: Files with the ``COMPUTED_FEATURES`` of each engine; NumPy computes everything. They are not imported: one needs torch. The word is for
#: a supported model: golden models run with PyTorch, and TensorRT has built their engines and run none.
ENGINES = {
    "NumPy": (None, "runs"),
    "PyTorch": ("trt_kvcache/torch_engine/engine.py", "runs"),
    "TensorRT": ("trt_kvcache/builder/resolved_options.py", "builds"),
}

#: The cell of a family whose published checkpoints all have a vision tower: they are in the row of the vision family.
_ONLY_VISION = "published with vision only"


def checkpoints_table() -> str:
    """Return the published checkpoints that open and that are refused, one line per family; unknown families come last."""
    opens: dict[str, list[str]] = {name: [] for name in FAMILIES}
    refused: dict[str, dict[str, list[str]]] = {name: {} for name in [*FAMILIES, ""]}
    for path in sorted(PUBLISHED.glob("*.json"), key=lambda path: path.stem):
        config = json.loads(path.read_text(encoding="utf-8"))["config"]
        try:
            opens[ModelConfig.from_dict(config, default_dtype="bfloat16").family] += name_of(path.stem)
        except ConfigError as error:
            refused[family_of(config)].setdefault(reason(error), []).append(path.stem)
    lines = [
        f"| family | published checkpoints that open | refused, with reason | {' | '.join(ENGINES)} |",
        f"|---|---|---|{'---|' * len(ENGINES)}",
    ]
    for name, family in FAMILIES.items():
        cells = [family.title, ", ".join(opens[name]) or _ONLY_VISION, grouped(refused[name]), *verdicts(name)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, f"| others | none | {grouped(refused[''])} |{' |' * len(ENGINES)}"])


def name_of(stem: str) -> list[str]:
    """Return the name of a checkpoint that opens; nothing for a ``text_config`` alone, which is no published checkpoint."""
    return [] if stem.endswith("-text") else [stem]


def grouped(names: dict[str, list[str]]) -> str:
    """Return names by reason."""
    return "; ".join(f"{why}: {', '.join(of_it)}" for why, of_it in names.items())


def family_of(config: dict[str, Any]) -> str:
    """Return the family of a refused configuration, or of its text model; empty without one."""
    names = (config["model_type"], config.get("text_config", {}).get("model_type"))
    return next((name for name in names if name in FAMILIES), "")


def reason(error: ConfigError) -> str:
    """Return the reason of a refusal, from the error text without its verbs."""
    found = re.search(r"\(model_type \S+\) (.*?)(?: in layer \d+)?, which (?:is|are) not supported", str(error))
    if found is None:
        return "another architecture"
    return re.sub(r"(^| and )(?:is|has) (?:an? )?", r"\1", found[1])


def architectures_table() -> str:
    """Return the features of each family beyond Llama, one line per family."""
    lines = ["| family | `model_type` | beyond Llama |", "|---|---|---|"]
    for family in FAMILIES.values():
        lines.append(f"| {family.title} | `{family.name}` | {', '.join(beyond_llama(tested_models(family.name)))} |")
    return "\n".join(lines)


def beyond_llama(models: list[ModelConfig]) -> list[str]:
    """Return the features of models in words, with the attention features that every engine has."""
    attention = [layer.mixer for model in models for layer in model.layers if isinstance(layer.mixer, AttentionConfig)]
    common = {
        "QKV bias": any(mixer.qkv_bias and not mixer.o_bias for mixer in attention),
        "QK-norm": any(mixer.qk_norm is not None and mixer.qk_norm.over == "head" and not mixer.rotates_before_norm for mixer in attention),
    }
    needs = [features(model) for model in models]
    return [
        *(name for name, has in common.items() if has),
        *(text for name, text in FEATURES.items() if any(name in need for need in needs)),
    ]


def verdicts(family: str) -> list[str]:
    """Return the verdict of each engine on the golden and published models of a family, some of which need more features than others."""
    found = []
    needs = [features(model) for model in (*golden_models(family), *published_models(family))]
    for path, word in ENGINES.values():
        lacking = [[] if path is None else [name for name in need if name not in computed_features(ROOT / path)] for need in needs]
        first = dict.fromkeys("experts" if names[0] == "experts" else FEATURES[names[0]] for names in lacking if names)
        found.append(word if not first else "no" if all(lacking) else f"{word} those without {' and '.join(first)}")
    return found


def tested_models(family: str) -> list[ModelConfig]:
    """Return the golden and published models of a family; of a text family without any, those of its vision family."""
    names = (family, family.removesuffix("_text"))
    return next((found for name in names if (found := [*golden_models(name), *published_models(name)])), [])


def golden_models(family: str) -> list[ModelConfig]:
    """Return the golden models of a family."""
    golden = ROOT / "tests" / "golden"
    paths = sorted([*golden.glob("*/config.json"), *golden.glob("vision/*/config.json")])
    models = [ModelConfig.from_dict(json.loads(path.read_text(encoding="utf-8"))) for path in paths]
    return [model for model in models if model.family == family]


def published_models(family: str) -> list[ModelConfig]:
    """Return the published models of a family that open."""
    found = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(PUBLISHED.glob("*.json")))
    models = [ModelConfig.from_dict(one["config"], default_dtype="bfloat16") for one in found if "is" in one]
    return [model for model in models if model.family == family]


def computed_features(path: Path) -> frozenset[str]:
    """Return the names in the ``COMPUTED_FEATURES`` of a file."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "COMPUTED_FEATURES" for target in targets):
            return frozenset(item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str))
    raise ValueError(f"{path}: expected COMPUTED_FEATURES, got none.")


def main() -> int:
    """Write the tables, or with ``--check`` say which ones differ."""
    made = {"models": ((README, MODELS), checkpoints_table()), "architectures": ((MODELS,), architectures_table())}
    codes = [
        write_tables(
            pages, f"<!-- {name}: docs/models_table.py -->", f"<!-- end of {name} -->", text, name=name, script="docs/models_table.py"
        )
        for name, (pages, text) in made.items()
    ]
    return max(codes)


if __name__ == "__main__":
    raise SystemExit(main())
