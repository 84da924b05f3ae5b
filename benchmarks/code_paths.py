"""How long the way through the package is: lines by subpackage, and the calls and files of a decode step and of a compaction.

    python benchmarks/code_paths.py [--out benchmarks/results/code_paths.json]

Calls are those of functions of the package, in a steady state: a step of ``generate`` with the NumPy engine over the shipped model of two
layers, one prompt; and a compaction that drops one of three slots. A line is documentation if it is part of a docstring, and code if it is
neither that nor a comment nor blank.
"""

import argparse
import ast
import os
import sys
from collections import Counter
from pathlib import Path

from environment import write_result

import trt_kvcache
from trt_kvcache import HostMemory, InferenceSession, KVCacheManager

PACKAGE = Path(trt_kvcache.__file__).parent
MODEL = PACKAGE.parent / "examples" / "tiny-llama"
KINDS = ("documentation", "code", "comments", "blank")


def count_lines(path):
    """Return the lines of a file by kind."""
    source = path.read_text(encoding="utf-8")
    documented = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    found = Counter()
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip()
        kind = "documentation" if number in documented else "blank" if not text else "comments" if text.startswith("#") else "code"
        found[kind] += 1
    return found


def lines_by_room():
    """Return the lines of each subpackage by kind, with the number of its files."""
    rooms = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        rooms.setdefault(parts[0] if len(parts) > 1 else ".", Counter()).update({"files": 1, **count_lines(path)})
    return {name: dict(counts) for name, counts in rooms.items()}


def calls_of(action):
    """Return the calls of functions of the package that an action makes, and the files that they are in."""
    calls = []

    def note(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            calls.append(os.path.relpath(frame.f_code.co_filename, PACKAGE))

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return {"calls": len(calls), "files": len(set(calls)), "calls_by_file": dict(Counter(calls).most_common())}


def decode_step():
    """Return the calls of one token of ``generate``."""
    with InferenceSession.from_model(MODEL, engine="numpy") as session:
        tokens = session.generate([5, 6, 7], max_new_tokens=8, ignore_eos=True)
        for _ in range(4):
            next(tokens)
        return calls_of(lambda: next(tokens))


def compaction():
    """Return the calls of a compaction of three slots."""
    with InferenceSession.from_model(MODEL, engine="numpy", max_batch_size=3) as session:
        config = session.cache.kv_config
    with KVCacheManager(config, memory=HostMemory()) as cache:
        stream = cache.memory.create_stream()
        cache.reset_for_new_sequences([5, 6, 7], stream=stream)
        cache.compact_batch([-1, 0, 1], 3, 2, stream=stream)
        cache.reset_for_new_sequences([5, 6, 7], stream=stream)
        return calls_of(lambda: cache.compact_batch([-1, 0, 1], 3, 2, stream=stream))


def main():
    """Count, print, write the file."""
    parser = argparse.ArgumentParser(description="Lines of the package, and calls of a step")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "code_paths.json")
    arguments = parser.parse_args()
    rooms = lines_by_room()
    total = Counter()
    for name, counts in sorted(rooms.items(), key=lambda item: -sum(item[1].values())):
        total.update(counts)
        print(f"{name:14} {counts['files']:4} files " + " ".join(f"{counts.get(kind, 0):6} {kind}" for kind in KINDS))
    lines = sum(total[kind] for kind in KINDS)
    print(f"{'total':14} {total['files']:4} files " + " ".join(f"{total[kind]:6} {kind}" for kind in KINDS) + f", {lines} lines")
    paths = {"decode_step": decode_step(), "compaction": compaction()}
    for name, found in paths.items():
        print(f"{name}: {found['calls']} calls in {found['files']} files")
    write_result(arguments.out, {"lines": lines, "total": dict(total), "rooms": rooms, **paths})


if __name__ == "__main__":
    main()
