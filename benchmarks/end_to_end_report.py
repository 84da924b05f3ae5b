"""What ``end_to_end.py`` measured, as the block of README.md and its picture: made by ``tables.py`` from the file of results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs" / "images"))

from draw import BLUE, GREEN, GREY, SOFT, Picture  # noqa: E402

SIDES = {
    "ours": ("trt_kvcache", GREEN),
    "compiled": ("transformers, static cache + torch.compile", BLUE),
    "eager": ("transformers, eager", GREY),
}
#: The colour of the line where the limit is.
LIMIT = "#b91c1c"

IMAGE = "docs/images/end_to_end.svg"

#: Tokens before the measured steps, in README; all of them are in benchmarks/README.md.
_SHOWN_PAST = 1024

#: Limits of the share of the bound at batch 1.
_SHARES = {"Llama-3-8B": "of_limit_8b_batch_1", "Gemma-4-E4B": "of_limit_gemma_4_batch_1"}

Shape = tuple[str, int, int]


def shapes(content: dict[str, Any]) -> dict[Shape, dict[str, dict[str, Any]]]:
    """Return what was measured, by shape and side. Shapes without ours are left out."""
    found: dict[Shape, dict[str, dict[str, Any]]] = {}
    for cell in content["cells"].values():
        if cell["ok"]:
            found.setdefault((cell["model"], cell["batch"], cell["past"]), {})[cell["side"]] = cell
    return {shape: sides for shape, sides in sorted(found.items()) if "ours" in sides}


def rows(content: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of the table of all results: what, measured, limit."""
    limits = content["limits"]
    compared = content["compared"].values()
    ties = sum(len(one["ties"]) for one in compared if one["ok"])
    equal = f"{sum(one['tokens'] for one in compared) - ties}, and {ties} at ties of floats" if all(one["ok"] for one in compared) else "no"
    yield "whole models: greedy tokens equal to those of transformers", equal, ""
    for (model, batch, past), sides in shapes(content).items():
        ours, is_8b = sides["ours"], model == "Llama-3-8B"
        at = f"{model}, batch {batch}, {past} past"
        yield f"{at}: time per token", f"{ours['step_ms']['median']:.2f} ms", ""
        share = limits.get(_SHARES.get(model)) if batch == 1 else None
        yield f"{at}: share of the bound", f"{ours['of_limit']:.2f}", "" if share is None else f"at least {share:.2f}"
        between = f"{limits['between_engine_us_05b']:g} us" if model == "Qwen2-0.5B" else ""
        yield f"{at}: time of a step outside the engine (a difference of two measurements)", f"{ours['between_engine_us']:.0f} us", between
        for side in ("compiled", "eager"):
            if side in sides:
                least = limits["compiled_over_ours_8b"].get(str(batch)) if side == "compiled" and is_8b and past == _SHOWN_PAST else None
                ratio = f"{sides[side]['step_ms']['median'] / ours['step_ms']['median']:.2f}"
                yield f"{at}: time of {SIDES[side][0]} over ours", ratio, "" if least is None else f"at least {least:g}"


def readme_block(content: dict[str, Any]) -> str:
    """Return the block of README.md."""
    device = content["device"]
    speeds = [cell["copy_gb_per_second"] / 1e3 for cell in content["cells"].values() if "copy_gb_per_second" in cell]
    ends = list(dict.fromkeys(f"{speed:.2f}" for speed in (min(speeds), max(speeds)))) if speeds else []
    copies = f"({' to '.join(ends)} TB/s; the copy is measured once for each model)." if speeds else "of this GPU."
    lines = [
        f"![Milliseconds per token of whole models on an {device}, with the time to read weights, K and V]({IMAGE})",
        "",
        f"Milliseconds per decode step (one token for every slot), after {_SHOWN_PAST} tokens. The models have random weights in bfloat16;",
        f'the GPU is an {device}. trt_kvcache is `InferenceSession.generate` with `engine="torch"`, top-p sampling, detokenization and a',
        "stop string. The last two columns are `generate` of transformers with sampling and detokenization: one with a static cache and",
        "`torch.compile`, one eager.",
        "The bound is the time to read weights, K and V at the speed of a copy",
        copies,
        *_other_run(content),
        "",
        "| model | batch | bound | trt_kvcache | static + compile | eager |",
        "|---|---|---|---|---|---|",
    ]
    for (model, batch, past), sides in shapes(content).items():
        if past == _SHOWN_PAST:
            times = [f"{sides[side]['step_ms']['median']:.2f}" if side in sides else "not measured" for side in SIDES]
            lines.append(f"| {model} | {batch} | {sides['ours']['limit_ms']:.2f} | {' | '.join(times)} |")
    return "\n".join(lines)


def llama_block(contents: Sequence[dict[str, Any]]) -> str:
    """Return the block of README.md beside llama.cpp, from runs with and without packed weights."""
    lines = [
        f"Compared with `llama-bench` of llama.cpp in the same run, on an {contents[0]['device']}, batch 1, in milliseconds: one token",
        f"after {_SHOWN_PAST} tokens, and a prompt of {_SHOWN_PAST} tokens. The times of trt_kvcache include sampling and detokenization,",
        "the times of llama.cpp do not.",
        "",
        "| model | weights: trt_kvcache / llama.cpp | token: trt_kvcache | token: llama.cpp | prompt: trt_kvcache | prompt: llama.cpp |",
        "|---|---|---|---|---|---|",
    ]
    for content in contents:
        for (model, *_), sides in shapes(content).items():
            if "llama" in sides:
                prompts = [f"{sides[side]['first_token_ms']:.1f}" for side in ("ours", "llama")]
                steps = [f"{sides[side]['step_ms']['median']:.2f}" for side in ("ours", "llama")]
                weights = f"{content['weights'] or 'bfloat16'} / {sides['llama']['block_type']}"
                lines.append(f"| {model} | {weights} | {' | '.join([*steps, *prompts])} |")
    return "\n".join(lines)


def readme_sentence(content: dict[str, Any]) -> str:
    """Return the figure of the first screen of README.md."""
    sides = shapes(content)["Llama-3-8B", 1, _SHOWN_PAST]
    times = {side: f"{sides[side]['step_ms']['median']:.2f} ms" for side in ("ours", "compiled")}
    return (
        f"**Speed**: Llama-3-8B in bfloat16 takes {times['ours']} a token on an {content['device']} (PyTorch engine, batch 1,\n"
        f"after {_SHOWN_PAST} tokens). transformers with a static cache and `torch.compile` takes {times['compiled']}. "
        "[All figures](#speed)."
    )


def _other_run(content: dict[str, Any]) -> list[str]:
    """Return when the sides of transformers were measured, if it was not with ours."""
    other = content.get("sides_of_transformers")
    return (
        []
        if other is None
        else [f"trt_kvcache was measured on {content['date'][:10]}, transformers on {other['date'][:10]}, on the same kind of GPU."]
    )


def picture(content: dict[str, Any]) -> str:
    """Return the SVG: for each model and batch a bar for each side, and a line where the limit is."""
    shown = [(model, batch, sides) for (model, batch, past), sides in shapes(content).items() if past == _SHOWN_PAST]
    longest = max(side["step_ms"]["median"] for _, _, sides in shown for side in sides.values())
    left, width, bar, gap = 160, 560, 16, 14
    height = 70 + sum(len(sides) * bar + gap for _, _, sides in shown)
    drawn = Picture(800, height, f"Milliseconds per token, after {_SHOWN_PAST} tokens, on an {content['device']}")
    x = 20
    for name, fill in SIDES.values():
        drawn.box(x, 14, 14, 14, fill, rounded=3)
        drawn.text(x + 20, 26, name, size=12, color=SOFT)
        x += 40 + 7 * len(name)
    drawn.line(27, 38, 27, 50, LIMIT)
    drawn.text(
        40,
        48,
        f"limit: the time that reading weights, K and V takes. Milliseconds per token, {_SHOWN_PAST} tokens past",
        size=12,
        color=SOFT,
    )
    y = 62
    for model, batch, sides in shown:
        drawn.text(left - 10, y + 12, f"{model}, batch {batch}", size=12, anchor="end")
        top = y
        for name, (_, fill) in SIDES.items():
            if name in sides:
                time = sides[name]["step_ms"]["median"]
                long = max(1, round(width * time / longest))
                drawn.box(left, y, long, bar - 2, fill, rounded=2)
                drawn.text(left + long + 6, y + 11, f"{time:.2f}", size=11, color=SOFT)
                y += bar
        limit = left + round(width * sides["ours"]["limit_ms"] / longest)
        drawn.line(limit, top - 2, limit, y, LIMIT)
        y += gap
    return drawn.svg()
